// Bytes of a fuzzer as the numbers, choices and buffers that a fuzz target makes of them. Where the
// bytes end, zeros follow, so that every input means something.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include "narrowfloat/error.h"

namespace narrowfloat::testing {

// Throws what no target expects, and so fails it.
inline void fuzz_require(bool condition, std::string_view what) {
  if (!condition) throw std::logic_error("fuzz target: " + std::string(what));
}

// Runs `parse`, which may refuse its input with an Error of a file's kind.
template <typename Parse>
void expect_result_or_error(const Parse& parse) {
  try {
    parse();
  } catch (const Error& error) {
    fuzz_require(error.kind() == ErrorKind::kCorruptData || error.kind() == ErrorKind::kUnsupported,
                 error.what());
  }
}

class FuzzInput {
 public:
  explicit FuzzInput(std::span<const uint8_t> bytes) : bytes_(bytes) {}

  uint8_t byte() {
    if (bytes_.empty()) return 0;
    const uint8_t first = bytes_.front();
    bytes_ = bytes_.subspan(1);
    return first;
  }
  bool flag() { return (byte() & 1U) != 0; }
  uint64_t bits(int num_bytes) {
    uint64_t value = 0;
    for (int i = 0; i < num_bytes; ++i) value |= static_cast<uint64_t>(byte()) << (8 * i);
    return value;
  }
  float number() { return std::bit_cast<float>(static_cast<uint32_t>(bits(4))); }

  // An enumerator in seven of eight cases, else a number that is none. `count`: of enumerators.
  template <typename Enum>
  Enum enumerator(int count) {
    const uint8_t choice = byte();
    if (choice % 8 != 7) return static_cast<Enum>(choice / 8 % count);
    return static_cast<Enum>(static_cast<int32_t>(bits(4)));
  }
  template <typename T>
  const T& pick(std::span<const T> values) {
    return values[byte() % values.size()];
  }

  // An extent, stride or count: a small number, or one at which products and sums overflow.
  int64_t extent() {
    constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
    constexpr std::array<int64_t, 24> kHostile = {
        -1,           std::numeric_limits<int64_t>::min(),
        kMax,         kMax - 1,
        kMax - 15,    kMax - 127,
        kMax / 2,     kMax / 2 + 1,
        kMax / 4 + 1, kMax / 8 + 1,
        kMax / 16,    kMax / 16 + 1,
        kMax / 32,    int64_t{1} << 32,
        -16,          (int64_t{1} << 32) - 1,
        -128,         int64_t{1} << 31,
        1 << 16,      (int64_t{1} << 31) - 1,
        -32,          3037000500,  // The square root of 2^63.
        1 << 20,      int64_t{1} << 60};
    const uint8_t choice = byte();
    if (choice < 160) return choice;
    if (choice < 200) return 16 * (choice - 159);
    if (choice < 250) return kHostile[choice % kHostile.size()];
    return static_cast<int64_t>(bits(8));
  }
  int32_t extent32() { return static_cast<int32_t>(static_cast<uint32_t>(extent())); }

  std::string_view rest() {
    const std::string_view text(reinterpret_cast<const char*>(bytes_.data()), bytes_.size());
    bytes_ = {};
    return text;
  }
  // Fills with the bytes that are left, over and over; with zeros if there are none.
  void fill(std::span<std::byte> out) const {
    const std::span<const std::byte> bytes = std::as_bytes(bytes_);
    const size_t first = std::min(bytes.size(), out.size());
    std::copy_n(bytes.begin(), first, out.begin());
    if (first == 0) std::fill(out.begin(), out.end(), std::byte{0});
    for (size_t done = first; done > 0 && done < out.size(); done *= 2) {
      std::copy_n(out.begin(), std::min(done, out.size() - done), out.subspan(done).begin());
    }
  }

 private:
  std::span<const uint8_t> bytes_;
};

}  // namespace narrowfloat::testing
