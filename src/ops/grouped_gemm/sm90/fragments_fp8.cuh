// As fragments.cuh, for activations in E4M3: four steps of 32 columns of E4M3 weights, and a factor
// for the sums of a group of 128 columns, which is a unit.
#pragma once

#include "base/host_device.h"
#include "device/ptx/wgmma_e4m3_between.cuh"
#include "ops/grouped_gemm/sm90/fragments.cuh"

namespace narrowfloat {

// E4M3 weights, which stay in shared memory: panels as wgmma reads them.
struct Fp8Weights {
  static constexpr WeightCoding kCoding = WeightCoding::kFp8;
  static constexpr bool kIsPanel = true;
  static constexpr float kRepair = 1.0F;

  __device__ static float scale(const uint8_t* unit) {
    return load_shared<float>(unit + unit_code_bytes(kCoding));
  }
};

// Weights that become E4M3 in registers. TheScales: of a thread's two rows in a unit.
template <WeightCoding kTheCoding, class TheScales>
struct E4m3Fragments {
  static constexpr WeightCoding kCoding = kTheCoding;
  static constexpr bool kIsPanel = false;
  static constexpr float kRepair = 1.0F;

  // Codes of the thread's two rows in steps from kFirst to kEnd - 1.
  template <int kFirst, int kEnd>
  struct Words {
    uint2 of_steps[kEnd - kFirst];
    [[nodiscard]] __device__ uint32_t word(int step, int row) const {
      return row == 0 ? of_steps[step - kFirst].x : of_steps[step - kFirst].y;
    }
  };
  template <int kFirst, int kEnd>
  __device__ static Words<kFirst, kEnd> load_words(const uint8_t* unit, int thread) {
    Words<kFirst, kEnd> words;
#pragma unroll
    for (int step = kFirst; step < kEnd; ++step) {
      words.of_steps[step - kFirst] =
          load_shared<uint2>(unit + (step / 2 * 128 + thread) * 16 + step % 2 * 8);
    }
    return words;
  }

  using Scales = TheScales;
  __device__ static Scales load_scales(const uint8_t* unit, int thread) {
    return load_shared<Scales>(unit + unit_code_bytes(kCoding) + thread / 4 * sizeof(Scales));
  }

  struct Loaded {
    Scales scales;
    Words<0, 4> words;
  };
  __device__ static Loaded load(const uint8_t* unit, int thread) {
    return {load_scales(unit, thread), load_words<0, 4>(unit, thread)};
  }

  template <int kSums>
  __device__ static void multiply(float (&sums)[kSums], const uint32_t (&a)[4], uint64_t rows,
                                  int accumulate) {
    wgmma_e4m3(sums, a, rows, accumulate);
  }
};

// E2M1 times a block's scale as E4M3: PRMT looks magnitudes up in a table of eight bytes. A word
// has eight codes of one row, nibble i the magnitude of code i; the signs of codes 0 to 3 are at
// bits 7, 15, 23, 31, of 4 to 7 at 3, 11, 19, 27.
struct E2m1Table {
  uint32_t low;   // Of 0, 0.5, 1, 1.5.
  uint32_t high;  // Of 2, 3, 4, 6.
};

// PRMT looks at 16 bits alone, so one word of magnitudes does for both halves.
__device__ inline uint32_t first_four(const E2m1Table& table, uint32_t word) {
  return permute_bytes(table.low, table.high, word & 0x77777777U) | (word & 0x80808080U);
}
__device__ inline uint32_t last_four(const E2m1Table& table, uint32_t word) {
  const uint32_t magnitudes = (word & 0x77777777U) >> 16;
  return permute_bytes(table.low, table.high, magnitudes) | (word << 4 & 0x80808080U);
}

// Scales are powers of two, so the table is exact: that of 1 with the exponent added to each byte
// (moe spec 11.2).
struct Mxfp4Fp8Weights : E4m3Fragments<WeightCoding::kMxfp4Fp8, uint2> {
  __device__ static void decode(const Loaded& loaded, Fragments& fragments) {
    decode(loaded.scales, loaded.words, fragments);
  }
  // kEnd - kFirst: a multiple of kDecodedSteps.
  static constexpr int kDecodedSteps = 1;
  template <int kFirst, int kEnd>
  __device__ static void decode(const Scales& scales, const Words<kFirst, kEnd>& words,
                                Fragments& fragments) {
#pragma unroll
    for (int step = kFirst; step < kEnd; ++step) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const uint32_t word = words.word(step, row);
        const E2m1Table table = table_of((row == 0 ? scales.x : scales.y) >> (8 * step) & 0xFFU);
        fragments[step][row] = first_four(table, word);
        fragments[step][2 + row] = last_four(table, word);
      }
    }
  }

 private:
  // shift: 8 * (k + 5); the table of k = -5 has the bytes of 0, 2^-6, 2^-5 and so on.
  __device__ static E2m1Table table_of(uint32_t shift) {
    return {shift * 0x01010100U + 0x14100800U, shift * 0x01010101U + 0x24201C18U};
  }
};

// Products rounded to E4M3 (moe spec 11.3). With c the code of scale * 2^-r, normal with 0.5 times
// it, powers of two times it are c plus multiples of 8, and 1.5 times it, rounded, is c + 4, or
// c + 5 for mantissas 1 to 5; so are 3 and 6 times it from 2 and 4 times it.
struct Nvfp4Fp8Weights : E4m3Fragments<WeightCoding::kNvfp4Fp8, uint4> {
  __device__ static void decode(const Loaded& loaded, Fragments& fragments) {
    decode(loaded.scales, loaded.words, fragments);
  }
  static constexpr int kDecodedSteps = 2;
  template <int kFirst, int kEnd>
  __device__ static void decode(const Scales& scales, const Words<kFirst, kEnd>& words,
                                Fragments& fragments) {
#pragma unroll
    for (int step = kFirst; step < kEnd; ++step) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const uint32_t word = words.word(step, row);
        const FourScales four(word_of(scales, row * 2 + step / 2));
        fragments[step][row] = first_four(four.table(step % 2 * 2), word);
        fragments[step][2 + row] = last_four(four.table(step % 2 * 2 + 1), word);
      }
    }
  }

 private:
  // Of four blocks of a row, a byte each: 1 and 1.5 times the scale. Bit 7 of what is stored: the
  // mantissa is 1 to 5.
  struct FourScales {
    uint32_t ones;
    uint32_t halves_more;

    __device__ explicit FourScales(uint32_t stored)
        : ones(stored & 0x7F7F7F7FU),
          halves_more(ones + (stored >> 7 & 0x01010101U) + 0x04040404U) {}

    // No byte reaches the next. The bytes' own signs, which are clear, make 0 (prmt's bit 3).
    [[nodiscard]] __device__ E2m1Table table(uint32_t block) const {
      const uint32_t zero_one_one_more = (4 + block) << 12 | block << 8 | block << 4 | 8 | block;
      const uint32_t one_more_twice = (4 + block) << 12 | block << 8 | (4 + block) << 4 | block;
      return {permute_bytes(ones, halves_more, zero_one_one_more) - 0x800U,
              permute_bytes(ones, halves_more, one_more_twice) + 0x10100808U};
    }
  };
};

}  // namespace narrowfloat
