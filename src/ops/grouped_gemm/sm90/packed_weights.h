// Packed weights of the Hopper GEMM: what prepare() writes and the main loop copies.
//
//   [expert][n sub-tile: block of 64 rows][unit: k tile], experts expert_image_bytes() apart
//   unit: codes of 64 rows and 64 columns (128 beside activations in E4M3) in the order of wgmma's
//   A fragments, then the unit's scales
//
// With u and g, block 2j has rows u and block 2j + 1 the matching rows g of columns 64j to 64j + 63
// of the activation's result, whatever the gate order; each half is padded.
//
// Rows and columns are padded to whole units with codes that mean zero. A warpgroup of four warps
// works on a block; thread w * 32 + 4q + c of it (warp w) holds weight rows 16w + 2q and 16w + 2q +
// 1, as rows q and q + 8 of the fragment, so that its results of one token are neighbours in the
// output. A unit is four steps of 16 (32) columns; of each, from column k on, a thread holds pairs
// of 16-bit values, or four E4M3 codes:
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
//   fp8            F32, the one of the unit; 16 bytes, and 112 up to the next unit
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

enum class WeightCoding : int {
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

inline constexpr int kUnitRows = 64;
// Bytes of an activation in shared memory; a unit has 128 bytes of each row.
NF_HOST_DEVICE constexpr int activation_bytes(WeightCoding coding) {
  return coding == WeightCoding::kFp8 || coding >= WeightCoding::kMxfp4Fp8 ? 1 : 2;
}
inline constexpr int kUnitRowBytes = 128;
NF_HOST_DEVICE constexpr int unit_cols(WeightCoding coding) {
  return kUnitRowBytes / activation_bytes(coding);
}

NF_HOST_DEVICE constexpr int code_bits_of(WeightCoding coding) {
  if (coding == WeightCoding::kBf16) return 16;
  return coding >= WeightCoding::kMxfp4Near ? 4 : 8;
}
NF_HOST_DEVICE constexpr int unit_code_bytes(WeightCoding coding) {
  return kUnitRows * unit_cols(coding) / 8 * code_bits_of(coding);
}
NF_HOST_DEVICE constexpr int unit_scale_bytes(WeightCoding coding) {
  switch (coding) {
    case WeightCoding::kFp8:
      return 16;
    case WeightCoding::kMxfp8:
    case WeightCoding::kMxfp4Near:
    case WeightCoding::kMxfp4:
      return 128;
    case WeightCoding::kNvfp4:
    case WeightCoding::kMxfp4Fp8:
      return 256;
    case WeightCoding::kNvfp4Rounded:
      return 256 + 64;
    case WeightCoding::kNvfp4Fp8:
      return 512;
    default:
      return 0;
  }
}
NF_HOST_DEVICE constexpr int unit_bytes(WeightCoding coding) {
  return unit_code_bytes(coding) + unit_scale_bytes(coding);
}

// From a unit to the next: subtiles begin where lines of L2 do.
NF_HOST_DEVICE constexpr int unit_stride(WeightCoding coding) {
  const int bytes = unit_bytes(coding);
  return coding == WeightCoding::kFp8 ? static_cast<int>(round_up(bytes, 128)) : bytes;
}

// The coding of a mode's first choice.
inline WeightCoding coding_of(MoeMode mode) {
  if (mode == MoeMode::kMxfp4Fp8) return WeightCoding::kMxfp4Fp8;
  if (mode == MoeMode::kNvfp4Fp8Rounded) return WeightCoding::kNvfp4Fp8;
  switch (moe_mode_info(mode).weights) {
    case WeightFormat::kBf16:
      return WeightCoding::kBf16;
    case WeightFormat::kFp8Tensor:
    case WeightFormat::kFp8Block:
      return WeightCoding::kFp8;
    case WeightFormat::kMxfp8:
      return WeightCoding::kMxfp8;
    case WeightFormat::kMxfp4:
      return WeightCoding::kMxfp4Near;
    case WeightFormat::kNvfp4:
      return WeightCoding::kNvfp4;
  }
  return WeightCoding::kNvfp4;
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

  // Rows of u and of g, which blocks have apart, are neighbours.
  [[nodiscard]] NF_HOST_DEVICE constexpr bool are_interleaved() const {
    return is_paired && order == GateOrder::kInterleaved;
  }
  // The caller's weight row for row `row` of block `block`; `rows` or above for padding.
  [[nodiscard]] NF_HOST_DEVICE constexpr int64_t source(int64_t block, int row) const {
    if (!is_paired) return block * kUnitRows + row;
    const int64_t h = block / 2 * kUnitRows + row;
    return h < rows / 2 ? gated_row(order, h, block % 2 == 1, rows) : rows;
  }
};

inline ImageRows image_rows(const GroupedGemmProblem& problem) {
  return {.rows = problem.rows,
          .is_paired = problem.gate_order.has_value(),
          .order = problem.gate_order.value_or(GateOrder::kUpGate)};
}

// Whether weights of this coding, beside activations with scales every 128 columns or not, are
// those of a mode whose second GEMM reads such rows (moe spec 6.4); rows of nvfp4_per_token are
// made from bf16.
NF_HOST_DEVICE constexpr bool writes_rows(WeightCoding coding, bool has_groups, RowFormat format) {
  switch (coding) {
    case WeightCoding::kBf16:
      return format == RowFormat::kBf16;
    case WeightCoding::kFp8:
      return format == RowFormat::kFp8Static || format == RowFormat::kFp8Group;
    case WeightCoding::kMxfp8:
      return format == RowFormat::kMxfp8;
    default:
      break;
  }
  if (has_groups) return format == RowFormat::kFp8Group;
  const bool is_nvfp4 = coding == WeightCoding::kNvfp4;
  return format == RowFormat::kBf16 || format == (is_nvfp4 ? RowFormat::kNvfp4 : RowFormat::kMxfp8);
}

// Whether the kernel for tiles of `tokens` has the registers to make them.
NF_HOST_DEVICE constexpr bool takes_rows(WeightCoding coding, int tokens, RowFormat format) {
  return tokens <= 64 || (coding != WeightCoding::kFp8 && format != RowFormat::kMxfp8);
}

struct UnitGrid {
  WeightCoding coding;
  int64_t blocks;  // n sub-tiles of an expert, each of 64 rows.
  int64_t units;   // k tiles of an n sub-tile.

  UnitGrid(const GroupedGemmProblem& problem, WeightCoding of)
      : coding(of),
        blocks(problem.gate_order ? 2 * ceil_div(problem.rows / 2, kUnitRows)
                                  : ceil_div(problem.rows, kUnitRows)),
        units(ceil_div(problem.cols, unit_cols(of))) {}
  [[nodiscard]] int64_t block_bytes() const { return units * unit_stride(coding); }
};

// Codings that scales may spread too far for: such experts get the other form.
NF_HOST_DEVICE constexpr bool may_not_fit(WeightCoding coding) {
  return coding == WeightCoding::kMxfp4Near || coding >= WeightCoding::kMxfp4Fp8;
}
inline WeightCoding wide_coding(WeightCoding coding) {
  return coding == WeightCoding::kNvfp4Fp8 ? WeightCoding::kNvfp4Rounded : WeightCoding::kMxfp4;
}

// Whether prepare() may have moved rows by a power of two, for bf16's range (moe spec 11.2).
NF_HOST_DEVICE constexpr bool has_ue8m0_scales(WeightCoding coding) {
  return coding == WeightCoding::kMxfp8 || coding == WeightCoding::kMxfp4Near ||
         coding == WeightCoding::kMxfp4;
}

// Whether prepare() moves rows by a power of two: those, or for E4M3's range.
NF_HOST_DEVICE constexpr bool has_row_powers(WeightCoding coding) {
  return has_ue8m0_scales(coding) || coding >= WeightCoding::kMxfp4Fp8;
}

// Added to a scale's byte by kMxfp4Near: as the exponent of a bf16 it is that of the scale times
// 2^126 then, for the place of the codes' bits (weight_decoder.cuh).
inline constexpr int kNearScaleOffset = 126;

// From an expert of the image to the next: room for either form where experts may have one of two.
inline int64_t expert_image_bytes(const GroupedGemmProblem& problem) {
  const WeightCoding coding = coding_of(problem.mode);
  const UnitGrid grid(problem, coding);
  const int64_t bytes = grid.blocks * grid.block_bytes();
  if (!may_not_fit(coding)) return bytes;
  const UnitGrid wide(problem, wide_coding(coding));
  return std::max(bytes, wide.blocks * wide.block_bytes());
}

// On the GPU of `problem`, from checkpoint order; the coding is the image's form. Allocates; waits
// until the image is made. Throws kUnsupported for UE8M0 scales further apart in a row than bf16's
// exponents reach.
PackedWeightData make_unit_image(const GroupedGemmProblem& problem, const WeightPieces& pieces,
                                 Stream stream);

}  // namespace narrowfloat
