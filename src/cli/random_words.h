// Memory of random bits that is the same on every machine: codes and byte scales of made-up
// weights.
#pragma once

#include <cstddef>
#include <cstdint>

namespace narrowfloat::cli {

// Words of 8 bytes: word i is a hash of `seed` and i where `mask` has ones, plus `base`. No sum may
// carry from one element of a word into the next.
struct RandomWords {
  uint64_t seed = 0;
  uint64_t mask = ~uint64_t{0};
  uint64_t base = 0;
};

uint64_t random_word_bits(uint64_t seed, uint64_t index);

// Bytes [first, first + size_bytes) of the words, in host memory, by several threads.
void fill_random_words(std::byte* to, uint64_t first, uint64_t size_bytes,
                       const RandomWords& words);

}  // namespace narrowfloat::cli
