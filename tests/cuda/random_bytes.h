// Random contents of large buffers: eight bytes a step.
#pragma once

#include <cstring>
#include <span>

#include "support/random.h"

namespace narrowfloat::testing {

inline void random_bytes(std::span<uint8_t> bytes, uint64_t seed) {
  Random random(seed);
  size_t at = 0;
  for (; at + 8 <= bytes.size(); at += 8) {
    const uint64_t word = random.bits();
    std::memcpy(bytes.data() + at, &word, 8);
  }
  for (; at < bytes.size(); ++at) bytes[at] = static_cast<uint8_t>(random.bits());
}

}  // namespace narrowfloat::testing
