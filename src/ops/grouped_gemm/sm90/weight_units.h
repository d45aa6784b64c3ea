// The weight image of the Hopper GEMM: what prepare() writes and the main loop copies.
//
//   [expert][block of 64 weight rows][unit of 64 columns]
//   unit: codes of 64 x 64 weights in the order of wgmma's A fragments, then the unit's scales
//
// Rows and columns are padded to whole units with codes that mean zero. A warpgroup of four warps
// works on one block; thread w * 32 + 4q + c of it (warp w) holds weight rows 16w + 2q and
// 16w + 2q + 1 of the block, as rows q and q + 8 of the fragment, so that its results of one token
// are neighbours in the output. Of 16 columns from k on it holds the pairs
//   a0 = row 0, k + 2c   a1 = row 1, k + 2c   a2 = row 0, k + 2c + 8   a3 = row 1, k + 2c + 8
//
//   bf16   [4 steps of 16 columns][128 threads][a0 a1 a2 a3]
//   e4m3   [2][128 threads][2 steps][a0 a1 a2 a3], two bytes a pair
//   e2m1   [128 threads][4 steps], a word a step whose bits fragments.cuh explains
//
// Scales, of threads' rows (index w * 8 + q):
//   fp8                  F32, the one of the unit; 16 bytes
//   mxfp8, mxfp4         [32][2 rows][2 blocks] UE8M0
//   nvfp4                [32][2 pairs of blocks][2 rows][2 blocks], E4M3 normalised to 5 exponent
//   and
//                        3 mantissa bits
//   nvfp4_fp8_rounded    behind these [32][2 rows]: 135 - r of the group of 128 columns (11.3)
#pragma once

#include "base/int_math.h"
#include "ops/grouped_gemm/grouped_gemm_problem.h"

namespace narrowfloat {

enum class WeightCoding : int {
  kBf16 = 0,
  kFp8 = 1,  // Per tensor as well: all scales of blocks are 1.
  kMxfp8 = 2,
  kMxfp4 = 3,
  kNvfp4 = 4,
  kNvfp4Rounded = 5,
};

inline constexpr int kUnitRows = 64;
inline constexpr int kUnitCols = 64;

NF_HOST_DEVICE constexpr int code_bits_of(WeightCoding coding) {
  if (coding == WeightCoding::kBf16) return 16;
  return coding >= WeightCoding::kMxfp4 ? 4 : 8;
}
NF_HOST_DEVICE constexpr int unit_code_bytes(WeightCoding coding) {
  return kUnitRows * kUnitCols / 8 * code_bits_of(coding);
}
NF_HOST_DEVICE constexpr int unit_scale_bytes(WeightCoding coding) {
  switch (coding) {
    case WeightCoding::kFp8:
      return 16;
    case WeightCoding::kMxfp8:
    case WeightCoding::kMxfp4:
      return 128;
    case WeightCoding::kNvfp4:
      return 256;
    case WeightCoding::kNvfp4Rounded:
      return 256 + 64;
    default:
      return 0;
  }
}
NF_HOST_DEVICE constexpr int unit_bytes(WeightCoding coding) {
  return unit_code_bytes(coding) + unit_scale_bytes(coding);
}

inline WeightCoding coding_of(MoeMode mode) {
  if (mode == MoeMode::kNvfp4Fp8Rounded) return WeightCoding::kNvfp4Rounded;
  switch (moe_mode_info(mode).weights) {
    case WeightFormat::kBf16:
      return WeightCoding::kBf16;
    case WeightFormat::kFp8Tensor:
    case WeightFormat::kFp8Block:
      return WeightCoding::kFp8;
    case WeightFormat::kMxfp8:
      return WeightCoding::kMxfp8;
    case WeightFormat::kMxfp4:
      return WeightCoding::kMxfp4;
    case WeightFormat::kNvfp4:
      return WeightCoding::kNvfp4;
  }
  return WeightCoding::kNvfp4;
}

struct UnitGrid {
  WeightCoding coding;
  int64_t blocks;  // Of an expert, of 64 rows.
  int64_t units;   // Of a block, of 64 columns.

  explicit UnitGrid(const GroupedGemmProblem& problem)
      : coding(coding_of(problem.mode)),
        blocks(ceil_div(problem.rows, kUnitRows)),
        units(ceil_div(problem.cols, kUnitCols)) {}
  [[nodiscard]] int64_t block_bytes() const { return units * unit_bytes(coding); }
};

// On the GPU of `problem`, from checkpoint order. Allocates; waits until the image is made.
int64_t unit_image_bytes(const GroupedGemmProblem& problem);
WeightImage make_unit_image(const GroupedGemmProblem& problem, const WeightSource& source,
                            Stream stream);

}  // namespace narrowfloat
