// Packed weights (mma_image.h) of a lane: read from shared memory and decoded to operands of
// multiply_add_bf16(), a block of 32 columns at a time.
//
// E2M1 and E4M3 codes are moved to the exponent and mantissa of bf16, which is the number times a
// small power of two, and multiplied by its reciprocal: exact. E4M3 scales of E2M1 codes, with that
// reciprocal but for 2^-8, are the factor instead, and so are UE8M0 scales of E2M1 codes, with it
// but for 2^-2, where bf16 has that product of all scales of an expert; else they are a second
// factor. Sums are multiplied by what is missing (kSumFactor). UE8M0 scales of E4M3 codes are
// factors of a block's sums, since bf16 has not all products.
#pragma once

#include "device/ptx/packed.cuh"
#include "device/ptx/shared_memory.cuh"
#include "formats/ue8m0.h"
#include "ops/grouped_gemm/sm80/mma_image.h"

namespace narrowfloat {

// Pairs of bf16 powers of two.
inline constexpr uint32_t kPairTwoTo127 = 0x7F007F00U;
inline constexpr uint32_t kPairTwoTo126 = 0x7E807E80U;
inline constexpr uint32_t kPairTwoTo120 = 0x7B807B80U;
inline constexpr uint32_t kPairTwoTo111 = 0x77007700U;
inline constexpr uint32_t kPairQuarter = 0x3E803E80U;

// Pair `pair` of a word of E2M1 codes in the places of place_e2m1(), times 2^-126.
__device__ inline uint32_t small_e2m1(uint32_t word, int pair) {
  constexpr uint32_t kPlaces = 0x81C081C0U;
  if (pair < 3) return word << (3 * pair) & kPlaces;
  return (word << 1 & 0x80008000U) | (word >> 5 & 0x01000100U) | (word >> 4 & 0x00C000C0U);
}

// The E4M3 codes in the upper bytes of the halves, times 2^-120. NaN is 480.
__device__ inline uint32_t small_e4m3_of_upper(uint32_t word) {
  return (word & 0x80008000U) | (word >> 4 & 0x07F007F0U);
}
// Those in the lower bytes.
__device__ inline uint32_t small_e4m3_of_lower(uint32_t word) {
  return (word << 8 & 0x80008000U) | (word << 4 & 0x07F007F0U);
}

// Ones in the exponent where small_e4m3_...() has NaN.
__device__ inline uint32_t nan_exponents(uint32_t small) {
  const uint32_t nan = ((small & 0x07F007F0U) + 0x00100010U) & 0x08000800U;
  return (nan << 4) - (nan >> 4);
}

// The E4M3 codes in the upper bytes of the halves, times 2^118.
__device__ inline uint32_t large_e4m3(uint32_t word) {
  const uint32_t small = small_e4m3_of_upper(word);
  return mul_bf16x2(mul_bf16x2(small, kPairTwoTo127), kPairTwoTo111) | nan_exponents(small);
}

// The UE8M0 codes in the lower bytes of the halves, as a quarter of themselves.
__device__ inline uint32_t quarter_ue8m0(uint32_t word) {
  // Bit 6 is 2^-127 where the code is 0, and makes a NaN where it is 255.
  const uint32_t is_end = ((word + 0x00010001U) | (0x01000100U - word)) & 0x01000100U;
  return mul_bf16x2(word << 7 | is_end >> 2, kPairQuarter);
}

// The UE8M0 codes in the lower bytes of the halves, up to kMostNearScale, times 2^124.
__device__ inline uint32_t near_ue8m0(uint32_t word) { return (word + 0x007C007CU) << 7; }

// `kStagesPerChunk`: 2 where shared memory has half of a chunk's blocks.
template <MmaCoding kCoding, int kStagesPerChunk = 1>
class MmaWeights {
 public:
  // The factor that sums still lack.
  static constexpr float kSumFactor = kCoding == MmaCoding::kNvfp4  ? 256.0F
                                      : mma_code_bits(kCoding) == 4 ? 4.0F
                                                                    : 1.0F;

  // `chunk`: of a strip, in shared memory.
  __device__ MmaWeights(uint32_t chunk, int lane) : codes_at_(chunk + 16 * lane) {
    constexpr int kBytes = mma_scale_bytes(kCoding);
    if constexpr (kBytes == 0) return;
    const uint32_t own = chunk + mma_code_bytes(kCoding) + lane / 4 * 2 * kBytes;
#pragma unroll
    for (int i = 0; i < kScaleWords; ++i) scales_[i] = load_shared(own + 4 * i);
    if constexpr (kCoding == MmaCoding::kNvfp4) {
      // Bytes h and h + 2 of a word to the upper bytes of the halves, h = 0 or 1 by lane.
      const uint32_t selector = 0x2404U + 0x1010U * (lane % 4 / 2);
#pragma unroll
      for (uint32_t& word : scales_) word = large_e4m3(permute_bytes(word, 0, selector));
    } else if constexpr (kBits == 4) {
      const uint32_t words[2] = {scales_[0], scales_[1]};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t pair = permute_bytes(words[i / 2], 0, i % 2 == 0 ? 0x4140U : 0x4342U);
        scales_[i] = kCoding == MmaCoding::kMxfp4 ? quarter_ue8m0(pair) : near_ue8m0(pair);
      }
    }
  }

  // The operands of the two instructions of a block. Blocks come in order.
  __device__ void decode(int block, uint32_t (&a)[2][4]) {
    if constexpr (kBits == 16) return load_operands(block, a);
    load(block);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        a[pair / 2][pair % 2 * 2 + row] = pair_of(row, block, pair);
      }
    }
  }

  // The factor of sums of a row: of a block of 32 columns, or of the chunk.
  [[nodiscard]] __device__ float factor(int row, int block) const {
    if constexpr (kCoding == MmaCoding::kE4m3Scaled) return bits_float(scales_[row]);
    return UE8M0::decode(static_cast<uint8_t>(scales_[row] >> (8 * block)));
  }

 private:
  static constexpr int kBits = mma_code_bits(kCoding);
  static_assert(kStagesPerChunk == 1 || kCoding == MmaCoding::kBf16);
  static constexpr int kLoadWords = 2;
  static constexpr int kBlockWords = kBits / 4;
  static constexpr int kScaleWords = 2 * mma_scale_bytes(kCoding) / 4;  // Both rows have them.

  // bf16 lies as the instructions take it.
  __device__ void load_operands(int block, uint32_t (&a)[2][4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int piece = i * (4 / kStagesPerChunk) + block;
      const uint4 words = load_shared_16(codes_at_ + static_cast<uint32_t>(512 * piece));
      a[i][0] = words.x;
      a[i][1] = words.y;
      a[i][2] = words.z;
      a[i][3] = words.w;
    }
  }

  // Words of the lane's rows from `block` on, if the last load has not had them: half of a piece.
  __device__ void load(int block) {
    const int first = block * kBlockWords;
    if (first % kLoadWords != 0) return;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      // A piece has 4 words.
      const int piece = row * kBlockWords + first / 4;
      const uint2 words =
          load_shared_8(codes_at_ + static_cast<uint32_t>(512 * piece + first % 4 * 4));
      codes_[row][0] = words.x;
      codes_[row][1] = words.y;
    }
  }

  // Columns 2 * pair and 2 * pair + 1 of the lane's eight, as bf16.
  [[nodiscard]] __device__ uint32_t pair_of(int row, int block, int pair) const {
    if constexpr (kBits == 8) {
      const uint32_t word = codes_[row][pair / 2];
      const uint32_t small = pair % 2 == 0 ? small_e4m3_of_lower(word) : small_e4m3_of_upper(word);
      const uint32_t exact = mul_bf16x2(small, kPairTwoTo120);
      if constexpr (kCoding == MmaCoding::kE4m3) return exact | nan_exponents(small);
      return exact;
    } else {
      const uint32_t small = small_e2m1(codes_[row][block % 2], pair);
      const uint32_t scales = scales_[2 * row + block / 2];
      const uint32_t scale = block % 2 == 0 ? low_halves(scales) : high_halves(scales);
      if constexpr (kCoding != MmaCoding::kMxfp4) return mul_bf16x2(small, scale);
      return mul_bf16x2(mul_bf16x2(small, kPairTwoTo126), scale);
    }
  }

  uint32_t codes_at_;
  uint32_t codes_[2][kLoadWords];
  // E2M1 has those of two blocks in a word, as factors; others are as they are.
  uint32_t scales_[kBits == 4 ? 4 : 2];
};

}  // namespace narrowfloat
