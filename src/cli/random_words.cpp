// Numbers come from a hash of their position (splitmix64), so threads can fill a buffer in any
// order. queue_random_words() of bench/cuda_kernels.cu makes the same words on a GPU.
#include "cli/random_words.h"

#include <algorithm>
#include <cstring>

#include "cli/threads.h"

namespace narrowfloat::cli {
namespace {

constexpr uint64_t kWordBytes = sizeof(uint64_t);
constexpr uint64_t kPieceBytes = 1U << 22U;  // Filled by one thread at a time.

}  // namespace

uint64_t random_word_bits(uint64_t seed, uint64_t index) {
  uint64_t x = seed * 0xD1342543DE82EF95ULL + (index + 1) * 0x9E3779B97F4A7C15ULL;
  x = (x ^ x >> 30U) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ x >> 27U) * 0x94D049BB133111EBULL;
  return x ^ x >> 31U;
}

void fill_random_words(std::byte* to, uint64_t first, uint64_t size_bytes,
                       const RandomWords& words) {
  const uint64_t pieces = (size_bytes + kPieceBytes - 1) / kPieceBytes;
  for_each_index(static_cast<int64_t>(pieces), [&](int64_t piece) {
    const uint64_t begin = static_cast<uint64_t>(piece) * kPieceBytes;
    const uint64_t end = std::min(begin + kPieceBytes, size_bytes);
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

}  // namespace narrowfloat::cli
