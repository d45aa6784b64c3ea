// The packed weights of the portable GEMM: what prepare() writes and the main loop reads.
//
//   [expert][strip of 16 weight rows][chunk of 128 columns]: codes, then scales
//
// mma_source_row() says which rows those are.
//
// Codes lie as the lanes of a warp read them: [pieces][32 lanes][16 bytes]. Lane 4g + t holds rows
// 2g and 2g + 1 of the strip, as rows g and g + 8 of the instruction's a, so that its results of a
// token are neighbours. Of the columns it holds 32b + 8t to 32b + 8t + 7 of each block b of 32; as
// both sides of a product have the same order of columns, any order does. Two instructions take a
// block, 4 columns of a lane each.
//
//   bf16   pieces [2 instructions][4 blocks]    columns 0 1 of both rows, columns 2 3 of both rows
//   E4M3   pieces [2 rows][2 blocks]            two blocks, each two words of columns 0 2 1 3
//   E2M1   pieces [2 rows]                      four blocks, each a word: place_e2m1()
//
// E4M3 codes that have a scale and are NaN make that scale NaN, and count for numbers.
//
// Scales: [8 g][2 rows] of F32 for the chunk (1), UE8M0 of its blocks of 32 (4), or E4M3 of its
// blocks of 16 (8). Columns are padded with codes that mean zero, and scales of 1.
//
// With MXFP4 a byte of each expert follows: not 0 where it has scales above kMostNearScale.
#pragma once

#include "base/int_math.h"
#include "ops/grouped_gemm/grouped_gemm_problem.h"
#include "ops/grouped_gemm/packed/packed_weights.h"

namespace narrowfloat {

inline constexpr int kMmaStripRows = 16;
inline constexpr int kMmaChunkCols = 128;

enum class MmaCoding : int {
  kBf16 = 0,
  kE4m3 = 1,
  kE4m3Scaled = 2,  // One F32 a row and chunk: 128x128 blocks, or NVFP4 rounded to E4M3.
  kMxfp8 = 3,
  kMxfp4 = 4,
  kNvfp4 = 5,
  kMxfp4Near = 6,  // kMxfp4 of an expert that has no scales above kMostNearScale.
};

// The code of 8 in UE8M0. Up to there scales times 2^124 are numbers of bf16.
inline constexpr uint32_t kMostNearScale = 130;

// Bits of a code, and bytes of a row's scales of a chunk.
NF_HOST_DEVICE constexpr int mma_code_bits(MmaCoding coding) {
  if (coding == MmaCoding::kBf16) return 16;
  const bool is_mxfp4 = coding == MmaCoding::kMxfp4 || coding == MmaCoding::kMxfp4Near;
  return is_mxfp4 || coding == MmaCoding::kNvfp4 ? 4 : 8;
}
NF_HOST_DEVICE constexpr int mma_scale_bytes(MmaCoding coding) {
  if (coding == MmaCoding::kNvfp4) return 8;
  return coding == MmaCoding::kBf16 || coding == MmaCoding::kE4m3 ? 0 : 4;
}
// Pieces of 16 bytes of a lane.
NF_HOST_DEVICE constexpr int mma_pieces(MmaCoding coding) { return mma_code_bits(coding) / 2; }
NF_HOST_DEVICE constexpr int mma_code_bytes(MmaCoding coding) { return mma_pieces(coding) * 512; }
NF_HOST_DEVICE constexpr int mma_chunk_bytes(MmaCoding coding) {
  return mma_code_bytes(coding) + kMmaStripRows * mma_scale_bytes(coding);
}

// The bits of the E2M1 code of column 2 * pair in its word; those of column 2 * pair + 1 are 16
// further. Of three pairs they are apart as in bf16, in what these leave are those of the fourth.
NF_HOST_DEVICE constexpr uint32_t place_e2m1(uint32_t code, int pair) {
  if (pair < 3) return ((code & 7U) << 6 | (code & 8U) << 12) >> (3 * pair);
  return (code & 12U) << 11 | (code & 3U) << 10;
}

inline MmaCoding mma_coding(MoeMode mode) {
  if (mode == MoeMode::kNvfp4Fp8Rounded || mode == MoeMode::kNvfp4Fp8Token) {
    return MmaCoding::kE4m3Scaled;
  }
  switch (moe_mode_info(mode).weights) {
    case WeightFormat::kBf16:
      return MmaCoding::kBf16;
    case WeightFormat::kFp8Tensor:
      return MmaCoding::kE4m3;
    case WeightFormat::kFp8Block:
      return MmaCoding::kE4m3Scaled;
    case WeightFormat::kMxfp8:
      return MmaCoding::kMxfp8;
    case WeightFormat::kMxfp4:
      return MmaCoding::kMxfp4;
    case WeightFormat::kNvfp4:
      break;
  }
  return MmaCoding::kNvfp4;
}

// The caller's weight row that row `row` of the image has. Where the gate order is known, rows of u
// and g of the same column are neighbours, and so are their sums.
NF_HOST_DEVICE constexpr int64_t mma_source_row(const ImageRows& rows, int64_t row) {
  return rows.is_paired ? gated_row(rows.order, row / 2, row % 2 == 1, rows.rows) : row;
}

struct MmaGrid {
  int64_t strips;
  int64_t chunks;
  int64_t chunk_bytes;

  explicit MmaGrid(const GroupedGemmProblem& problem)
      : strips(problem.rows / kMmaStripRows),
        chunks(ceil_div(problem.cols, int64_t{kMmaChunkCols})),
        chunk_bytes(mma_chunk_bytes(mma_coding(problem.mode))) {}
  [[nodiscard]] int64_t expert_bytes() const { return strips * chunks * chunk_bytes; }

  // The bytes that follow the experts.
  [[nodiscard]] static int64_t flag_bytes(const GroupedGemmProblem& problem) {
    return mma_coding(problem.mode) == MmaCoding::kMxfp4 ? problem.experts : 0;
  }
};

PackedWeightData make_mma_image(const GroupedGemmProblem& problem, const WeightPieces& pieces,
                                Stream stream);

}  // namespace narrowfloat
