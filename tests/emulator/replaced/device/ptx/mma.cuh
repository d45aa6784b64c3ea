// Emulated: src/device/ptx/mma.cuh.
#pragma once

#include "emulator/machine.h"
#include "formats/float16.h"

namespace narrowfloat {

inline void multiply_add_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const auto lanes_of = [](uint32_t low, uint32_t high) {
    return emulator::exchange_lanes(0xFFFFFFFFU, uint64_t{high} << 32 | low);
  };
  const emulator::LaneValues columns_0[2] = {lanes_of(a[0], a[1]), lanes_of(a[2], a[3])};
  const emulator::LaneValues rows = lanes_of(b0, b1);
  // Element k % 2 of a word of `bits`, which has another in its upper half.
  const auto element = [](uint64_t bits, bool is_upper, int k) {
    const auto word = static_cast<uint32_t>(is_upper ? bits >> 32 : bits);
    return bf16_to_float(static_cast<uint16_t>(k % 2 == 0 ? word : word >> 16));
  };
  const int g = emulator::lane() / 4;
  const int t = emulator::lane() % 4;
  for (int i = 0; i < 4; ++i) {
    for (int k = 0; k < 16; ++k) {
      const int owner = k % 8 / 2;
      const float x = element(columns_0[k / 8].bits[4 * g + owner], i >= 2, k);
      const float y = element(rows.bits[4 * (2 * t + i % 2) + owner], k >= 8, k);
      d[i] += x * y;
    }
  }
}

}  // namespace narrowfloat
