// Packed weights of the Hopper GEMM: what prepare() writes and the main loop copies.
//
//   [expert][n sub-tile: block of 64 rows][k tile], experts expert_image_bytes() apart
//   k tile: codes of 64 rows and 64 columns (128 beside activations in E4M3) in the order of
//   wgmma's A fragments, then the k tile's scales
//
// With u and g, block 2j has rows u and block 2j + 1 the matching rows g of columns 64j to 64j + 63
// of the activation's result, whatever the gate order; each half is padded.
//
// Rows and columns are padded to whole k tiles with codes that mean zero. A warpgroup of four warps
// works on a block; thread w * 32 + 4q + c of it (warp w) holds weight rows 16w + 2q and 16w + 2q +
// 1, as rows q and q + 8 of the fragment, so that its results of one token are neighbours in the
// output. A k tile is four steps of 16 (32) columns; of each, from column k on, a thread holds
// pairs of 16-bit values, or four E4M3 codes:
//   a0 = row 0, k + 2c   a1 = row 1, k + 2c   a2 = row 0, k + 2c + 8   a3 = row 1, k + 2c + 8
//   a0 = row 0, k + 4c   a1 = row 1, k + 4c   a2 = row 0, k + 4c + 16  a3 = row 1, k + 4c + 16
//
//   bf16          [4 steps][128 threads][a0 a1 a2 a3]
//   fp8           [64 rows][128 bytes], a subtile that wgmma reads from shared memory, in the
//                 128-byte swizzle; its row 16w + q is weight row 16w + 2q, 16w + q + 8 is 16w + 2q
//                 + 1: the results lie as with fragments
//   mxfp8         [2][128 threads][2 steps][a0 a1 a2 a3], two bytes a pair
//   mxfp4, nvfp4  [128 threads][4 steps], a word a step whose bits weight_decoder.cuh explains
//   mxfp4_fp8, nvfp4_fp8
//                 [2][128 threads][2 steps][2 rows], a word of eight codes: weight_decoder.cuh
//
// Scales, of threads' rows (index w * 8 + q):
//   fp8            F32, the one of the k tile; 16 bytes, and 112 up to the next k tile
//   mxfp8, mxfp4   [32][2 rows][2 blocks] UE8M0; mxfp4_near 126 more, which bf16 has as an exponent
//   nvfp4          [32][2 pairs of blocks][2 rows][2 blocks], E4M3 normalised to 5 exponent and 3
//                  mantissa bits; rounded to E4M3 (moe spec 11.3), then [32][2 rows] 135 -
//                  r of the group of 128 columns
//   mxfp4_fp8      [32][2 rows][4 blocks] 8 * (k + 5) for a scale of 2^(k + r)
//   nvfp4_fp8      [32][2 rows][8 blocks] the E4M3 code of scale * 2^-r, bit 7 what 1.5 times it
//                  needs; r is the row's in both, which the GEMM gives back to its sums
#pragma once

#include <algorithm>

#include "base/int_math.h"
#include "ops/grouped_gemm/grouped_gemm_problem.h"

namespace narrowfloat {

enum class WeightEncoding : int {
  kBf16 = 0,
  kFp8 = 1,  // Per tensor as well: all scales of blocks are 1.
  kMxfp8 = 2,
  kMxfp4Near = 3,  // Scales of up to 2, those of a row within 2^126.
  kMxfp4 = 4,
  kNvfp4 = 5,
  kNvfp4Rounded = 6,
  kMxfp4Fp8 = 7,  // For activations in E4M3.
  kNvfp4Fp8 = 8,  // Likewise, rounded to E4M3.
};

inline constexpr int kSubtileRows = 64;
// Bytes of an activation in shared memory; a k tile has 128 bytes of each row.
NF_HOST_DEVICE constexpr int activation_bytes(WeightEncoding encoding) {
  return encoding == WeightEncoding::kFp8 || encoding >= WeightEncoding::kMxfp4Fp8 ? 1 : 2;
}
inline constexpr int kKTileRowBytes = 128;
NF_HOST_DEVICE constexpr int k_tile_cols(WeightEncoding encoding) {
  return kKTileRowBytes / activation_bytes(encoding);
}

NF_HOST_DEVICE constexpr int code_bits_of(WeightEncoding encoding) {
  if (encoding == WeightEncoding::kBf16) return 16;
  return encoding >= WeightEncoding::kMxfp4Near ? 4 : 8;
}
NF_HOST_DEVICE constexpr int k_tile_code_bytes(WeightEncoding encoding) {
  return kSubtileRows * k_tile_cols(encoding) / 8 * code_bits_of(encoding);
}
NF_HOST_DEVICE constexpr int k_tile_scale_bytes(WeightEncoding encoding) {
  switch (encoding) {
    case WeightEncoding::kFp8:
      return 16;
    case WeightEncoding::kMxfp8:
    case WeightEncoding::kMxfp4Near:
    case WeightEncoding::kMxfp4:
      return 128;
    case WeightEncoding::kNvfp4:
    case WeightEncoding::kMxfp4Fp8:
      return 256;
    case WeightEncoding::kNvfp4Rounded:
      return 256 + 64;
    case WeightEncoding::kNvfp4Fp8:
      return 512;
    default:
      return 0;
  }
}
NF_HOST_DEVICE constexpr int k_tile_bytes(WeightEncoding encoding) {
  return k_tile_code_bytes(encoding) + k_tile_scale_bytes(encoding);
}

// From a k tile to the next: subtiles begin where lines of L2 do.
NF_HOST_DEVICE constexpr int k_tile_stride(WeightEncoding encoding) {
  const int bytes = k_tile_bytes(encoding);
  return encoding == WeightEncoding::kFp8 ? static_cast<int>(round_up(bytes, 128)) : bytes;
}

// The encoding of a mode's first choice.
inline WeightEncoding encoding_of(MoeMode mode) {
  if (mode == MoeMode::kMxfp4Fp8 || mode == MoeMode::kMxfp4Fp8Token) {
    return WeightEncoding::kMxfp4Fp8;
  }
  if (mode == MoeMode::kNvfp4Fp8Rounded || mode == MoeMode::kNvfp4Fp8Token) {
    return WeightEncoding::kNvfp4Fp8;
  }
  switch (moe_mode_info(mode).weights) {
    case WeightFormat::kBf16:
      return WeightEncoding::kBf16;
    case WeightFormat::kFp8Tensor:
    case WeightFormat::kFp8Block:
      return WeightEncoding::kFp8;
    case WeightFormat::kMxfp8:
      return WeightEncoding::kMxfp8;
    case WeightFormat::kMxfp4:
      return WeightEncoding::kMxfp4Near;
    case WeightFormat::kNvfp4:
      return WeightEncoding::kNvfp4;
  }
  return WeightEncoding::kNvfp4;
}

// Which of the caller's weight rows makes u or g of column `h` of the activation's result.
NF_HOST_DEVICE constexpr int64_t gated_row(GateOrder order, int64_t h, bool is_gate, int64_t rows) {
  if (order == GateOrder::kInterleaved) return 2 * h + (is_gate ? 0 : 1);
  const bool is_second_half = is_gate == (order == GateOrder::kUpGate);
  return is_second_half ? rows / 2 + h : h;
}

// The rows of an image.
struct ImageRows {
  int64_t rows = 0;  // An expert's.
  bool is_paired = false;
  GateOrder order = GateOrder::kUpGate;

  // Rows of u and of g, which n sub-tiles have apart, are neighbours.
  [[nodiscard]] NF_HOST_DEVICE constexpr bool are_interleaved() const {
    return is_paired && order == GateOrder::kInterleaved;
  }
  // The caller's weight row for row `row` of block `block`; `rows` or above for padding.
  [[nodiscard]] NF_HOST_DEVICE constexpr int64_t source(int64_t block, int row) const {
    if (!is_paired) return block * kSubtileRows + row;
    const int64_t h = block / 2 * kSubtileRows + row;
    return h < rows / 2 ? gated_row(order, h, block % 2 == 1, rows) : rows;
  }
};

inline ImageRows image_rows(const GroupedGemmProblem& problem) {
  return {.rows = problem.rows,
          .is_paired = problem.gate_order.has_value(),
          .order = problem.gate_order.value_or(GateOrder::kUpGate)};
}

// Whether weights of this encoding, beside activations with scales every 128 columns or not, are
// those of a mode whose second GEMM reads such rows (moe spec 6.4); rows with a scale each are made
// from bf16.
NF_HOST_DEVICE constexpr bool writes_rows(WeightEncoding encoding, bool has_groups,
                                          RowFormat format) {
  switch (encoding) {
    case WeightEncoding::kBf16:
      return format == RowFormat::kBf16;
    case WeightEncoding::kFp8:
      return format == RowFormat::kFp8Static || format == RowFormat::kFp8Group;
    case WeightEncoding::kMxfp8:
      return format == RowFormat::kMxfp8;
    default:
      break;
  }
  if (has_groups) {
    const bool may_have_token_rows = encoding == WeightEncoding::kNvfp4Rounded;
    return format == RowFormat::kFp8Group || (may_have_token_rows && format == RowFormat::kBf16);
  }
  if (encoding >= WeightEncoding::kMxfp4Fp8) return format == RowFormat::kBf16;
  const bool is_nvfp4 = encoding == WeightEncoding::kNvfp4;
  return format == RowFormat::kBf16 || format == (is_nvfp4 ? RowFormat::kNvfp4 : RowFormat::kMxfp8);
}

// Whether the kernel for tiles of `tokens` has the registers to make them.
NF_HOST_DEVICE constexpr bool takes_rows(WeightEncoding encoding, int tokens, RowFormat format) {
  return tokens <= 64 || (encoding != WeightEncoding::kFp8 && format != RowFormat::kMxfp8);
}

struct PackedGrid {
  WeightEncoding encoding;
  int64_t blocks;   // n sub-tiles of an expert, each of 64 rows.
  int64_t k_tiles;  // k tiles of an n sub-tile.

  PackedGrid(const GroupedGemmProblem& problem, WeightEncoding of)
      : encoding(of),
        blocks(problem.gate_order ? 2 * ceil_div(problem.rows / 2, kSubtileRows)
                                  : ceil_div(problem.rows, kSubtileRows)),
        k_tiles(ceil_div(problem.cols, k_tile_cols(of))) {}
  [[nodiscard]] int64_t block_bytes() const { return k_tiles * k_tile_stride(encoding); }
};

// Encodings that scales may spread too far for: such experts get the other encoding.
NF_HOST_DEVICE constexpr bool may_not_fit(WeightEncoding encoding) {
  return encoding == WeightEncoding::kMxfp4Near || encoding >= WeightEncoding::kMxfp4Fp8;
}
inline WeightEncoding wide_encoding(WeightEncoding encoding) {
  return encoding == WeightEncoding::kNvfp4Fp8 ? WeightEncoding::kNvfp4Rounded
                                               : WeightEncoding::kMxfp4;
}

// Whether prepare() may have moved rows by a power of two, for bf16's range (moe spec 11.2).
NF_HOST_DEVICE constexpr bool has_ue8m0_scales(WeightEncoding encoding) {
  return encoding == WeightEncoding::kMxfp8 || encoding == WeightEncoding::kMxfp4Near ||
         encoding == WeightEncoding::kMxfp4;
}

// Whether prepare() moves rows by a power of two: those, or for E4M3's range.
NF_HOST_DEVICE constexpr bool has_row_powers(WeightEncoding encoding) {
  return has_ue8m0_scales(encoding) || encoding >= WeightEncoding::kMxfp4Fp8;
}

// Added to a scale's byte by kMxfp4Near: as the exponent of a bf16 it is that of the scale times
// 2^126 then, for the place of the codes' bits (weight_decoder.cuh).
inline constexpr int kNearScaleOffset = 126;

// From an expert of the image to the next: room for either encoding where experts may have one of
// two.
inline int64_t expert_image_bytes(const GroupedGemmProblem& problem) {
  const WeightEncoding encoding = encoding_of(problem.mode);
  const PackedGrid grid(problem, encoding);
  const int64_t bytes = grid.blocks * grid.block_bytes();
  if (!may_not_fit(encoding)) return bytes;
  const PackedGrid wide(problem, wide_encoding(encoding));
  return std::max(bytes, wide.blocks * wide.block_bytes());
}

// On the GPU of `problem`, from checkpoint order; the encoding is the image's encoding. Allocates;
// waits until the image is made. Throws kUnsupported for UE8M0 scales further apart in a row than
// bf16's exponents reach.
PackedWeightData make_packed_weights(const GroupedGemmProblem& problem, const WeightPieces& pieces,
                                     Stream stream);

}  // namespace narrowfloat
