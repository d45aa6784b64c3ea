// Threads take the next index from a counter, since chunks need not cost the same. Random numbers
// come from a hash of their position (splitmix64), so threads can fill a buffer in any order.
#include "cli_common/host_memory.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <exception>
#include <limits>
#include <mutex>
#include <thread>

#include <fmt/format.h>

#include "narrowfloat/error.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat::cli {
namespace {

constexpr uint64_t kWordBytes = sizeof(uint64_t);
constexpr uint64_t kChunkBytes = 1U << 22U;  // One thread fills so many at a time.
constexpr int64_t kWorkspaceAlignment = 256;

float float_from_bf16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16U);
}

float float_from_f16(uint16_t bits) {
  const int exponent = bits >> 10U & 0x1F;
  const int fraction = bits & 0x3FF;
  const float sign = (bits & 0x8000U) != 0 ? -1.0F : 1.0F;
  if (exponent == 0x1F) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    return fraction == 0 ? sign * kInfinity : std::numeric_limits<float>::quiet_NaN();
  }
  const int significand = exponent == 0 ? fraction : fraction | 0x400;
  return sign * std::ldexp(static_cast<float>(significand), std::max(exponent, 1) - 25);
}

template <typename Word, typename Convert>
std::vector<float> converted(std::span<const std::byte> bytes, Convert convert) {
  std::vector<float> values(bytes.size() / sizeof(Word));
  for (size_t i = 0; i < values.size(); ++i) {
    Word word{};
    std::memcpy(&word, bytes.data() + i * sizeof(Word), sizeof(Word));
    values[i] = convert(word);
  }
  return values;
}

bool is_plain(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
}

}  // namespace

void for_each_index(int64_t count, const std::function<void(int64_t)>& body) {
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  std::exception_ptr failure;
  const auto work = [&] {
    try {
      for (int64_t i = next++; i < count; i = next++) body(i);
    } catch (...) {
      next = count;
      const std::lock_guard lock(mutex);
      if (!failure) failure = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> threads;
    const int64_t num_threads_used = std::min<int64_t>(std::max(num_threads(), 1), count);
    for (int64_t i = 1; i < num_threads_used; ++i) threads.emplace_back(work);
    work();
  }
  if (failure) std::rethrow_exception(failure);
}

uint64_t random_word_bits(uint64_t seed, uint64_t index) {
  uint64_t x = seed * 0xD1342543DE82EF95ULL + (index + 1) * 0x9E3779B97F4A7C15ULL;
  x = (x ^ x >> 30U) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ x >> 27U) * 0x94D049BB133111EBULL;
  return x ^ x >> 31U;
}

void fill_random_words(std::byte* to, uint64_t first, uint64_t size_bytes,
                       const RandomWords& words) {
  const uint64_t chunks = (size_bytes + kChunkBytes - 1) / kChunkBytes;
  for_each_index(static_cast<int64_t>(chunks), [&](int64_t chunk) {
    const uint64_t begin = static_cast<uint64_t>(chunk) * kChunkBytes;
    const uint64_t end = std::min(begin + kChunkBytes, size_bytes);
    for (uint64_t at = begin; at < end;) {
      const uint64_t index = (first + at) / kWordBytes;
      const uint64_t skipped = (first + at) % kWordBytes;
      const uint64_t count = std::min(kWordBytes - skipped, end - at);
      const uint64_t word = (random_word_bits(words.seed, index) & words.mask) + words.base;
      std::memcpy(to + at, reinterpret_cast<const std::byte*>(&word) + skipped, count);
      at += count;
    }
  });
}

AlignedBytes::AlignedBytes(int64_t size_bytes)
    : size_(size_bytes), storage_(static_cast<size_t>(size_bytes + kWorkspaceAlignment)) {}

TensorView AlignedBytes::view() const {
  const auto address = reinterpret_cast<uintptr_t>(storage_.data());
  const uintptr_t skip =
      (kWorkspaceAlignment - address % kWorkspaceAlignment) % kWorkspaceAlignment;
  return TensorView::contiguous(storage_.data() + skip, DType::kU8, {size_});
}

TensorView matrix_view(std::span<const float> values, int64_t cols) {
  return TensorView::contiguous(values.data(), DType::kF32,
                                {static_cast<int64_t>(values.size()) / cols, cols});
}

TensorView matrix_view(std::span<const uint16_t> values, int64_t cols) {
  return TensorView::contiguous(values.data(), DType::kBF16,
                                {static_cast<int64_t>(values.size()) / cols, cols});
}

std::vector<float> to_floats(std::span<const std::byte> bytes, DType dtype) {
  if (dtype == DType::kF32) return converted<float>(bytes, [](float value) { return value; });
  if (dtype == DType::kBF16) return converted<uint16_t>(bytes, float_from_bf16);
  if (dtype == DType::kF16) return converted<uint16_t>(bytes, float_from_f16);
  throw Error(ErrorKind::kUnsupported,
              fmt::format("expected BF16, F16 or F32 values, got {}", name(dtype)));
}

std::vector<uint16_t> to_bf16(std::span<const float> values) {
  std::vector<uint16_t> words(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    const auto bits = std::bit_cast<uint32_t>(values[i]);
    const uint32_t rounded =
        std::isnan(values[i]) ? bits | 1U << 22U : bits + 0x7FFFU + (bits >> 16U & 1U);
    words[i] = static_cast<uint16_t>(rounded >> 16U);
  }
  return words;
}

std::vector<float> read_floats(const SafetensorsReader& file, const TensorInfo& tensor) {
  return read_floats(file, tensor, tensor.size_bytes);
}

std::vector<float> read_floats(const SafetensorsReader& file, const TensorInfo& tensor,
                               uint64_t size_bytes) {
  if (!is_plain(tensor.dtype)) {
    throw Error(ErrorKind::kUnsupported,
                fmt::format("{}: tensor '{}': expected BF16, F16 or F32, got {}",
                            printable(file.path()), printable(tensor.name), name(tensor.dtype)));
  }
  std::vector<std::byte> bytes(size_bytes);
  file.read(tensor, 0, bytes);
  return to_floats(bytes, tensor.dtype);
}

}  // namespace narrowfloat::cli
