// Packed weights (mma_image.h) in the registers of a lane, and as operands of
// multiply_add_bf16(): a chunk of 128 columns of a strip, decoded block by block of 32 columns.
//
// E2M1 and E4M3 codes are shifted to the exponent and mantissa of bf16, which is the number times a
// small power of two, and multiplied by its reciprocal: exact, as is the product of E2M1 and an
// E4M3 scale. UE8M0 scales are factors of a block's sums, since bf16 has not all products.
#pragma once

#include "device/ptx/packed.cuh"
#include "device/vector_io.cuh"
#include "formats/ue8m0.h"
#include "ops/grouped_gemm/sm80/mma_image.h"

namespace narrowfloat {

// Two E2M1 codes, at bits 0 and 16.
__device__ inline uint32_t e2m1_to_bf16x2(uint32_t codes) {
  constexpr uint32_t kTwoTo126 = 0x7E807E80U;
  const uint32_t small = (codes & 0x00070007U) << 6 | (codes & 0x00080008U) << 12;
  return mul_bf16x2(small, kTwoTo126);
}

// Two E4M3 codes, at bits 0 and 16.
__device__ inline uint32_t e4m3_to_bf16x2(uint32_t codes) {
  constexpr uint32_t kTwoTo120 = 0x7B807B80U;
  const uint32_t magnitudes = codes & 0x007F007FU;
  const uint32_t small = magnitudes << 4 | (codes & 0x00800080U) << 8;
  // Bit 7 of a half is set where the code is NaN; then all bits of the exponent are.
  const uint32_t nan = (magnitudes + 0x00010001U) & 0x00800080U;
  return mul_bf16x2(small, kTwoTo120) | ((nan << 8) - nan);
}

template <MmaCoding kCoding>
struct MmaWeights {
  static constexpr int kPieces = mma_pieces(kCoding);
  static constexpr int kRowPieces = kPieces / 2;
  static constexpr int kScaleWords = 2 * mma_scale_bytes(kCoding) / 4;  // Both rows have them.

  uint4 codes[kPieces];
  uint32_t scales[kScaleWords == 0 ? 1 : kScaleWords];

  __device__ void load(const uint8_t* chunk, int lane) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      codes[i] = load_readonly<uint4>(chunk + (i * 32 + lane) * 16);
    }
    const uint8_t* own = chunk + mma_code_bytes(kCoding) + lane / 4 * 4 * kScaleWords;
    if constexpr (kScaleWords == 2) {
      const auto words = load_readonly<uint2>(own);
      scales[0] = words.x;
      scales[1] = words.y;
    } else if constexpr (kScaleWords == 4) {
      const auto words = load_readonly<uint4>(own);
      scales[0] = words.x;
      scales[1] = words.y;
      scales[2] = words.z;
      scales[3] = words.w;
    }
  }

  // The operands of the two instructions of a block.
  __device__ void decode(int block, int lane, uint32_t (&a)[2][4]) const {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        uint32_t& word = a[pair / 2][pair % 2 * 2 + row];
        word = pair_of(row, block, pair);
        if constexpr (kCoding == MmaCoding::kNvfp4) {
          word = mul_bf16x2(word, block_scale(row, block, lane));
        }
      }
    }
  }

  // The factor of sums of a row: of a block of 32 columns, or of the chunk.
  [[nodiscard]] __device__ float factor(int row, int block) const {
    if constexpr (kCoding == MmaCoding::kE4m3Scaled) return bits_float(scales[row]);
    return UE8M0::decode(static_cast<uint8_t>(scales[row] >> (8 * block)));
  }

 private:
  __device__ static uint32_t word_of(const uint4& piece, int i) {
    return i == 0 ? piece.x : i == 1 ? piece.y : i == 2 ? piece.z : piece.w;
  }

  // Columns 2 * pair and 2 * pair + 1 of the lane's eight, as bf16.
  [[nodiscard]] __device__ uint32_t pair_of(int row, int block, int pair) const {
    constexpr int kBits = mma_code_bits(kCoding);
    if constexpr (kBits == 16) {
      return word_of(codes[row * kRowPieces + block], pair);
    } else if constexpr (kBits == 8) {
      const uint4& piece = codes[row * kRowPieces + block / 2];
      return e4m3_to_bf16x2(word_of(piece, block % 2 * 2 + pair / 2) >> (pair % 2 * 8));
    } else {
      return e2m1_to_bf16x2(word_of(codes[row], block) >> (4 * pair));
    }
  }

  // The E4M3 scale of the lane's columns, twice.
  [[nodiscard]] __device__ uint32_t block_scale(int row, int block, int lane) const {
    const int at = 2 * block + lane % 4 / 2;
    const uint32_t code = scales[2 * row + block / 2] >> (at % 4 * 8) & 0xFFU;
    return e4m3_to_bf16x2(code | code << 16);
  }
};

}  // namespace narrowfloat
