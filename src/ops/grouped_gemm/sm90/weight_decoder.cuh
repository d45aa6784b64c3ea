// Weight decoders: from packed weights (packed_weights.h) to wgmma's operand A in registers, one
// policy an encoding. load() gives what thread `thread` of a warpgroup has of a k tile, decode()
// the four steps that it holds.
//
//   16-bit floats   steps of 16 columns; all values are exact, times 1 / kSumFactor
//   E4M3            steps of 32 columns, beside activations in E4M3; a k tile has 128 columns
//   FP8 weights     need no decoding: wgmma reads them from shared memory
#pragma once

#include "base/host_device.h"
#include "device/ptx/keep.cuh"
#include "device/ptx/packed.cuh"
#include "device/ptx/shared_memory.cuh"
#include "device/ptx/wgmma_bf16_between.cuh"
#include "device/ptx/wgmma_e4m3_between.cuh"
#include "device/ptx/wgmma_e4m3_shared.cuh"
#include "ops/grouped_gemm/packed/packed_weights.h"

namespace narrowfloat {

using Fragments = uint32_t[4][4];  // [step][a0 to a3]

template <typename Word>
__device__ inline Word load_shared(const uint8_t* shared) {
  return *reinterpret_cast<const Word*>(shared);
}

__device__ inline uint32_t twice(uint32_t half) { return half * 0x10001U; }

// bf16 pairs are the tensor core's own.
struct Bf16Weights {
  static constexpr WeightEncoding kEncoding = WeightEncoding::kBf16;
  static constexpr bool kIsSharedOperand = false;  // Operand A lies in shared memory.
  static constexpr float kSumFactor = 1.0F;

  struct Loaded {
    uint4 words[4];
  };
  __device__ static Loaded load(const uint8_t* k_tile, int thread) {
    Loaded loaded;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      loaded.words[step] = load_shared<uint4>(k_tile + (step * 128 + thread) * 16);
    }
    return loaded;
  }
  __device__ static void decode(const Loaded& loaded, Fragments& fragments) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      fragments[step][0] = loaded.words[step].x;
      fragments[step][1] = loaded.words[step].y;
      fragments[step][2] = loaded.words[step].z;
      fragments[step][3] = loaded.words[step].w;
    }
  }
  template <int kSums>
  __device__ static void multiply(float (&sums)[kSums], const uint32_t (&a)[4], uint64_t rows,
                                  int accumulate) {
    wgmma_bf16(sums, a, rows, accumulate);
  }
};

// 16 bytes of e4m3 pairs: two steps.
struct Fp8Pairs {
  uint4 words;
  __device__ uint32_t word(int step, int half) const {
    if (step == 0) return half == 0 ? words.x : words.y;
    return half == 0 ? words.z : words.w;
  }
};

// Half `row` of a word, in both halves.
__device__ inline uint32_t broadcast(uint32_t rows, int row) {
  return row == 0 ? low_halves(rows) : high_halves(rows);
}

// Scales of a thread's two rows in a k tile, one byte a block of 32 columns.
struct MxScales {
  uint32_t word;
  __device__ static MxScales load(const uint8_t* scales, int thread) {
    return {load_shared<uint32_t>(scales + thread / 4 * 4)};
  }
  // 2^(code - 127) of both rows as bf16: 2^-127 is a denormal, 255 is NaN.
  __device__ uint32_t rows(int block) const {
    const uint32_t codes = word >> (8 * block) & 0x00FF00FFU;
    return __vmaxu2(codes << 7 | (codes + 0x00010001U >> 8 & 0x00010001U), 0x00400040U);
  }
};

struct Mxfp8Weights : Bf16Weights {
  static constexpr WeightEncoding kEncoding = WeightEncoding::kMxfp8;

  struct Loaded {
    Fp8Pairs pairs[2];
    MxScales scales;
  };
  __device__ static Loaded load(const uint8_t* k_tile, int thread) {
    return {{{load_shared<uint4>(k_tile + thread * 16)},
             {load_shared<uint4>(k_tile + (128 + thread) * 16)}},
            MxScales::load(k_tile + k_tile_code_bytes(kEncoding), thread)};
  }
  __device__ static void decode(const Loaded& loaded, Fragments& fragments) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const Fp8Pairs& pairs = loaded.pairs[step / 2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t word = pairs.word(step % 2, half);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          // The two codes in the upper bytes of the halves, then exponent and mantissa four bits
          // down: the value times 2^-120.
          const uint32_t upper = permute_bytes(word, 0, row == 0 ? 0x1404U : 0x3424U);
          const uint32_t small = (upper & 0x80008000U) | (upper >> 4 & 0x07F007F0U);
          fragments[step][2 * half + row] = mul_bf16x2(
              mul_bf16x2(small, 0x7B807B80U), broadcast(loaded.scales.rows(step / 2), row));
        }
      }
    }
  }
};

// A word of eight e2m1 codes as four pairs of bf16, times 2^-126: sign to bit 15, exponent and
// mantissa to bits 8 to 6 of each half. The codes' bits lie so that this takes nine instructions:
//   half of a word, bit   15  14  13 12 11 10  9   8 7   6 5 4  3   2 1 0
//                         s3  m3  s1 e  e  m   s0  e e   e e m  s2' e e m
//   of pair                3   3   1  2  2  2   0  3 3   1 1 1  2   0 0 0       ' of the other half
__device__ inline void expand_e2m1(uint32_t word, uint32_t (&pairs)[4]) {
  constexpr uint32_t kMask = 0x81C081C0U;
  pairs[0] = word << 6 & kMask;
  pairs[1] = word << 2 & kMask;
  pairs[2] = __funnelshift_r(word, word, 4) & kMask;
  pairs[3] = (word & 0x81808180U) | (word >> 8 & 0x00400040U);
}

__device__ inline uint32_t word_of(const uint4& words, int index) {
  if (index < 2) return index == 0 ? words.x : words.y;
  return index == 2 ? words.z : words.w;
}

// Codes of E2M1, and scales of a thread's two rows in a k tile.
template <WeightEncoding kTheEncoding, class Scales>
struct E2m1Weights : Bf16Weights {
  static constexpr WeightEncoding kEncoding = kTheEncoding;

  struct Loaded {
    uint4 words;
    Scales scales;
  };
  __device__ static Loaded load(const uint8_t* k_tile, int thread) {
    return {load_shared<uint4>(k_tile + thread * 16),
            Scales::load(k_tile + k_tile_code_bytes(kEncoding), thread)};
  }
};

// One multiplication by scale * 2^126, for scales from 2^-125 to 2: the fragments of kMxfp4.
struct Mxfp4NearWeights : E2m1Weights<WeightEncoding::kMxfp4Near, MxScales> {
  __device__ static void decode(const Loaded& loaded, Fragments& fragments) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint32_t codes = loaded.scales.word;
      const uint32_t rows = (step < 2 ? codes << 7 : codes >> 1) & 0x7F807F80U;
      expand_e2m1(word_of(loaded.words, step), fragments[step]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        fragments[step][i] = mul_bf16x2(fragments[step][i], broadcast(rows, i % 2));
      }
    }
  }
};

// All scales, at the price of a second multiplication.
struct Mxfp4Weights : E2m1Weights<WeightEncoding::kMxfp4, MxScales> {
  __device__ static void decode(const Loaded& loaded, Fragments& fragments) {
    constexpr uint32_t kTwoTo126 = 0x7E807E80U;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      expand_e2m1(word_of(loaded.words, step), fragments[step]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t value = mul_bf16x2(fragments[step][i], kTwoTo126);
        fragments[step][i] = mul_bf16x2(value, broadcast(loaded.scales.rows(step / 2), i % 2));
      }
    }
  }
};

// Scales of a thread's two rows in a k tile, one byte a block of 16 columns.
struct Nvfp4Scales {
  uint2 words;
  __device__ static Nvfp4Scales load(const uint8_t* scales, int thread) {
    return {load_shared<uint2>(scales + thread / 4 * 8)};
  }
  // The scales of both rows as bf16, times 2^118: this undoes the 2^-126 of the codes and stays in
  // bf16's range for the largest scale, 448.
  __device__ uint32_t rows(int block) const {
    const uint32_t word = block < 2 ? words.x : words.y;
    const uint32_t shifted = block % 2 == 0 ? word << 4 : word >> 4;
    return (shifted & 0x0FF00FF0U) + 0x75807580U;
  }
};

struct Nvfp4Weights : E2m1Weights<WeightEncoding::kNvfp4, Nvfp4Scales> {
  static constexpr float kSumFactor = 256.0F;

  __device__ static void decode(const Loaded& loaded, Fragments& fragments) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint32_t rows = loaded.scales.rows(step);
      expand_e2m1(word_of(loaded.words, step), fragments[step]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        fragments[step][i] = mul_bf16x2(fragments[step][i], broadcast(rows, i % 2));
      }
    }
  }
};

// Each half to the nearest E4M3 value, ties to even, for magnitudes up to 448 and NaN: adding 16
// times its power of two (2^-6 at least) makes bf16's unit that of a 3-bit mantissa.
__device__ inline uint32_t round_to_e4m3(uint32_t pair) {
  const uint32_t magnitude = pair & 0x7FFF7FFFU;
  const uint32_t power = __vmaxu2(pair & 0x7F807F80U, 0x3C803C80U) + 0x02000200U;
  return sub_bf16x2(add_bf16x2(magnitude, power), power) | (pair & 0x80008000U);
}

// moe spec 11.3.
struct Nvfp4RoundedWeights : Bf16Weights {
  static constexpr WeightEncoding kEncoding = WeightEncoding::kNvfp4Rounded;
  static constexpr float kSumFactor = 256.0F;

  struct Loaded {
    Nvfp4Weights::Loaded exact;
    uint16_t rounding;
  };
  __device__ static Loaded load(const uint8_t* k_tile, int thread) {
    return {Nvfp4Weights::load(k_tile, thread),
            load_shared<uint16_t>(k_tile + k_tile_code_bytes(kEncoding) + 256 + thread / 4 * 2)};
  }
  __device__ static void decode(const Loaded& loaded, Fragments& fragments) {
    Nvfp4Weights::decode(loaded.exact, fragments);
    const uint32_t rounding = loaded.rounding;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      // 2^(8 - r), which also takes the 2^-8 of the values away, and its reciprocal.
      const uint32_t down = twice((rounding >> (8 * row) & 0xFFU) << 7);
      const uint32_t up = 0x7F007F00U - down;
#pragma unroll
      for (int step = 0; step < 4; ++step) {
#pragma unroll
        for (int i = row; i < 4; i += 2) {
          const uint32_t scaled = mul_bf16x2(fragments[step][i], down);
          fragments[step][i] = mul_bf16x2(round_to_e4m3(scaled), up);
        }
      }
    }
  }
};

// E4M3 weights, which stay in shared memory: subtiles as wgmma reads them.
struct Fp8Weights {
  static constexpr WeightEncoding kEncoding = WeightEncoding::kFp8;
  static constexpr bool kIsSharedOperand = true;
  static constexpr float kSumFactor = 1.0F;

  __device__ static float scale(const uint8_t* k_tile) {
    return load_shared<float>(k_tile + k_tile_code_bytes(kEncoding));
  }
};

// Shared memory of what a thread loads of a k tile: the first of its codes, and its scales.
struct E4m3Places {
  uint32_t codes = 0;
  uint32_t scales = 0;
};

// Weights that become E4M3 in registers. TheScales: of a thread's two rows in a k tile.
template <WeightEncoding kTheEncoding, class TheScales>
struct E4m3Fragments {
  static constexpr WeightEncoding kEncoding = kTheEncoding;
  static constexpr bool kIsSharedOperand = false;
  static constexpr float kSumFactor = 1.0F;

  struct Loaded {
    TheScales scales;
    uint2 words[4];  // A step's, of both rows.
    [[nodiscard]] __device__ uint32_t word(int step, int row) const {
      return row == 0 ? words[step].x : words[step].y;
    }
  };
  __device__ static Loaded load(const uint8_t* k_tile, int thread) {
    Loaded loaded{load_shared<TheScales>(k_tile + k_tile_code_bytes(kEncoding) +
                                         thread / 4 * sizeof(TheScales)),
                  {}};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      loaded.words[step] =
          load_shared<uint2>(k_tile + (step / 2 * 128 + thread) * 16 + step % 2 * 8);
    }
    return loaded;
  }

  // As load(), by addresses that a thread keeps.
  __device__ static E4m3Places places_of(uint32_t k_tile, int thread) {
    const auto own = static_cast<uint32_t>(thread);
    return {k_tile + own * 16, k_tile + static_cast<uint32_t>(k_tile_code_bytes(kEncoding)) +
                                   own / 4 * static_cast<uint32_t>(sizeof(TheScales))};
  }
  __device__ static Loaded load_at(const E4m3Places& places, uint32_t offset) {
    Loaded loaded;
    if constexpr (sizeof(TheScales) == 8) {
      loaded.scales = load_shared_8(places.scales + offset);
    } else {
      loaded.scales = load_shared_16(places.scales + offset);
    }
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const uint4 two = load_shared_16(places.codes + offset + pair * 128 * 16);
      loaded.words[2 * pair] = {two.x, two.y};
      loaded.words[2 * pair + 1] = {two.z, two.w};
    }
    return loaded;
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
  uint32_t low;   // Bytes of 0, 0.5, 1, 1.5.
  uint32_t high;  // Bytes of 2, 3, 4, 6.
};

// Magnitudes of eight codes, and their signs.
struct E2m1Codes {
  uint32_t magnitudes;
  uint32_t word;

  // The compiler would mask both halves of the magnitudes apart.
  __device__ explicit E2m1Codes(uint32_t of)
      : magnitudes(keep_in_register(of & 0x77777777U)), word(of) {}
  // PRMT looks at 16 bits alone.
  [[nodiscard]] __device__ uint32_t first_four(const E2m1Table& table) const {
    return permute_bytes(table.low, table.high, magnitudes) | (word & 0x80808080U);
  }
  [[nodiscard]] __device__ uint32_t last_four(const E2m1Table& table) const {
    return permute_bytes(table.low, table.high, magnitudes >> 16) | (word << 4 & 0x80808080U);
  }
};

// Scales are powers of two, so the table is exact: that of 1 with the exponent added to each byte
// (moe spec 11.2).
struct Mxfp4Fp8Weights : E4m3Fragments<WeightEncoding::kMxfp4Fp8, uint2> {
  __device__ static void decode(const Loaded& loaded, Fragments& fragments) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const E2m1Codes codes(loaded.word(step, row));
        const E2m1Table table =
            table_of(byte_of(row == 0 ? loaded.scales.x : loaded.scales.y, step));
        fragments[step][row] = codes.first_four(table);
        fragments[step][2 + row] = codes.last_four(table);
      }
    }
  }

 private:
  // Byte `index` of a word, in one instruction.
  __device__ static uint32_t byte_of(uint32_t word, uint32_t index) {
    return permute_bytes(word, 0, 0x4440U | index);
  }
  // shift: 8 * (k + 5); the table of k = -5 has the bytes of 0, 2^-6, 2^-5 and so on.
  __device__ static E2m1Table table_of(uint32_t shift) {
    return {shift * 0x01010100U + 0x14100800U, shift * 0x01010101U + 0x24201C18U};
  }
};

// Products rounded to E4M3 (moe spec 11.3). With c the code of scale * 2^-r, normal with 0.5 times
// it, powers of two times it are c plus multiples of 8, and 1.5 times it, rounded, is c + 4, or
// c + 5 for mantissas 1 to 5; so are 3 and 6 times it from 2 and 4 times it.
struct Nvfp4Fp8Weights : E4m3Fragments<WeightEncoding::kNvfp4Fp8, uint4> {
  __device__ static void decode(const Loaded& loaded, Fragments& fragments) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const E2m1Codes codes(loaded.word(step, row));
        const FourScales four(word_of(loaded.scales, row * 2 + step / 2));
        fragments[step][row] = codes.first_four(four.table(step % 2 * 2));
        fragments[step][2 + row] = codes.last_four(four.table(step % 2 * 2 + 1));
      }
    }
  }

 private:
  // Scales of four blocks of a row, a byte each, and 1.5 times them. Bit 7 of a stored scale: the
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

// Starts the wgmmas of a k tile of two E4M3 operands in shared memory, whose sums start again. a
// and b: descriptors in the 128-byte swizzle.
template <int kSums>
__device__ inline void multiply_k_tile(float (&sums)[kSums], uint64_t a, uint64_t b) {
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma_e4m3(sums, a + 2 * k, b + 2 * k, k > 0 ? 1 : 0);
}

}  // namespace narrowfloat
