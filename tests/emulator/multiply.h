// wgmma for one thread: its sums are rows q and q + 8 of its warp's 16, and columns 8j + 2c and
// 8j + 2c + 1 (q = lane / 4, c = lane % 4). It needs these rows of a, which its group of four lanes
// has in registers or all have in shared memory, and all of b.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "emulator/machine.h"
#include "formats/float16.h"
#include "formats/minifloat.h"

namespace emulator {

// 32 bytes of a row are what an instruction multiplies: 32 codes of E4M3, 16 numbers of bf16.
inline constexpr int kStepBytes = 32;

struct E4m3Operand {
  static constexpr int kCount = 32;
  static void widen(const uint8_t* bytes, float* to) {
    static const std::array<float, 256> table = [] {
      std::array<float, 256> values{};
      for (size_t i = 0; i < 256; ++i) {
        values[i] = narrowfloat::E4M3::decode(static_cast<uint8_t>(i));
      }
      return values;
    }();
    for (int i = 0; i < kCount; ++i) to[i] = table[bytes[i]];
  }
};

struct Bf16Operand {
  static constexpr int kCount = 16;
  static void widen(const uint8_t* bytes, float* to) {
    for (int i = 0; i < kCount; ++i) {
      uint16_t bits;
      std::memcpy(&bits, bytes + 2 * i, 2);
      to[i] = narrowfloat::bf16_to_float(bits);
    }
  }
};

// kStepBytes of row `row` of an operand in shared memory, as its descriptor says.
inline void load_row(uint32_t rank, uint64_t descriptor, int row, uint8_t* to) {
  const auto start = static_cast<uint32_t>(descriptor & 0x3FFFU) << 4;
  const auto stride = static_cast<uint32_t>(descriptor >> 32 & 0x3FFFU) << 4;
  require(descriptor >> 62 == 1, "an operand that is not in the 128-byte swizzle");
  for (uint32_t byte = 0; byte < kStepBytes; byte += 16) {
    const auto of_row = static_cast<uint32_t>(row);
    uint32_t at = start + of_row / 8 * stride + of_row % 8 * 128 + byte;
    at ^= (at >> 7 & 7U) << 4;
    std::memcpy(to + byte, shared_memory_of(rank, at, 16), 16);
  }
}

// a: rows q and q + 8.
template <class Operand>
void multiply_rows(float* sums, int count, const uint8_t (&a)[2][kStepBytes], uint32_t rank,
                   uint64_t b, int column, bool accumulates) {
  float rows[2][Operand::kCount];
  Operand::widen(a[0], rows[0]);
  Operand::widen(a[1], rows[1]);
  for (int i = 0; i < count / 4; ++i) {
    for (int next = 0; next < 2; ++next) {
      uint8_t bytes[kStepBytes];
      float values[Operand::kCount];
      load_row(rank, b, 8 * i + column + next, bytes);
      Operand::widen(bytes, values);
      for (int half = 0; half < 2; ++half) {
        double sum = 0;
        for (int k = 0; k < Operand::kCount; ++k) {
          sum += static_cast<double>(rows[half][k]) * static_cast<double>(values[k]);
        }
        float& target = sums[4 * i + 2 * half + next];
        target = static_cast<float>(accumulates ? static_cast<double>(target) + sum : sum);
      }
    }
  }
}

// a in registers: row q has the first 16 bytes in a[0], the others in a[2], 4 of each lane; row
// q + 8 in a[1] and a[3].
template <class Operand>
void multiply_registers(float* sums, int count, const uint32_t (&a)[4], uint64_t b,
                        int accumulate) {
  struct Rows {
    uint8_t bytes[2][kStepBytes];
  } rows;
  const int first = lane() / 4 * 4;
  for (int word = 0; word < 4; ++word) {
    const LaneValues& lanes = exchange_lanes(0xFFFFFFFFU, a[word]);
    for (int i = 0; i < 4; ++i) {
      const auto value = static_cast<uint32_t>(lanes.bits[first + i]);
      std::memcpy(rows.bytes[word % 2] + word / 2 * 16 + i * 4, &value, 4);
    }
  }
  multiply_async(sums, count, [=, rank = cluster_rank(), column = lane() % 4 * 2] {
    multiply_rows<Operand>(sums, count, rows.bytes, rank, b, column, accumulate != 0);
  });
}

// a in shared memory, likewise through a descriptor.
template <class Operand>
void multiply_shared(float* sums, int count, uint64_t a, uint64_t b, int accumulate) {
  const int row = warp() % 4 * 16 + lane() / 4;
  multiply_async(sums, count, [=, rank = cluster_rank(), column = lane() % 4 * 2] {
    uint8_t rows[2][kStepBytes];
    load_row(rank, a, row, rows[0]);
    load_row(rank, a, row + 8, rows[1]);
    multiply_rows<Operand>(sums, count, rows, rank, b, column, accumulate != 0);
  });
}

}  // namespace emulator
