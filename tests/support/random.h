// A small deterministic generator: the same seed gives the same cases on every platform, which the
// distributions of <random> do not promise.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>

namespace narrowfloat::testing {

// splitmix64.
inline uint64_t mix(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ULL;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBULL;
  return value ^ (value >> 31);
}

class Random {
 public:
  explicit Random(uint64_t seed) : state_(mix(seed + 0x9E3779B97F4A7C15ULL)) {}

  uint64_t bits() { return mix(state_ += 0x9E3779B97F4A7C15ULL); }
  uint32_t bits32() { return static_cast<uint32_t>(bits() >> 32); }
  // Uniform in [low, high].
  int64_t range(int64_t low, int64_t high) {
    const auto span = static_cast<uint64_t>(high - low) + 1;
    return low + static_cast<int64_t>(bits() % span);
  }
  bool chance(int percent) { return range(0, 99) < percent; }
  // Roughly N(0, 1): a sum of four uniform numbers.
  float normal() {
    const uint64_t word = bits();
    int32_t sum = 0;
    for (int i = 0; i < 4; ++i) sum += static_cast<int32_t>((word >> (16 * i)) & 0xFFFFU);
    return (static_cast<float>(sum) - 131070.0F) * 0x1.bb67aep-16F;
  }
  template <typename T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[range(0, static_cast<int64_t>(values.size()) - 1)];
  }
  template <typename T>
  const T& pick(std::span<const T> values) {
    return values[static_cast<size_t>(range(0, static_cast<int64_t>(values.size()) - 1))];
  }

 private:
  uint64_t state_;
};

}  // namespace narrowfloat::testing
