// What a grouped GEMM computes with, as data: how each mode uses its block scales, and the extents
// that follow from a mode and a weight shape.
//
// A mode splits K into groups and uses each side's block scales in one of two ways: in the decode
// (the factor of a value, before it is multiplied) or per group (the factor of a group's sum).
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "base/int_math.h"
#include "base/name_table.h"
#include "narrowfloat/moe_types.h"
#include "ops/grouped_gemm/grouped_gemm_problem.h"
#include "tensor/row_format.h"

namespace narrowfloat {

enum class ScaleUse : int { kNone = 0, kDecode = 1, kGroup = 2 };

struct GemmMode {
  MoeMode id;
  int64_t group_cols;  // 0: the whole K is one group.
  ScaleUse weight_scale;
  ScaleUse row_scale;
  bool rounds_weights = false;  // To E4M3 per 1x128 (moe spec 11.3).
};

// In the order of MoeMode (moe spec 6.4).
inline constexpr std::array kGemmModes{
    GemmMode{MoeMode::kBf16, 0, ScaleUse::kNone, ScaleUse::kNone},
    GemmMode{MoeMode::kFp8Tensor, 0, ScaleUse::kNone, ScaleUse::kNone},
    GemmMode{MoeMode::kFp8Block, 128, ScaleUse::kGroup, ScaleUse::kGroup},
    GemmMode{MoeMode::kMxfp8, 32, ScaleUse::kGroup, ScaleUse::kGroup},
    GemmMode{MoeMode::kMxfp4Mxfp8, 32, ScaleUse::kGroup, ScaleUse::kGroup},
    GemmMode{MoeMode::kMxfp4Bf16, 0, ScaleUse::kDecode, ScaleUse::kNone},
    GemmMode{MoeMode::kMxfp4Fp8, 128, ScaleUse::kDecode, ScaleUse::kGroup},
    GemmMode{MoeMode::kNvfp4, 0, ScaleUse::kDecode, ScaleUse::kDecode},
    GemmMode{MoeMode::kNvfp4PerToken, 0, ScaleUse::kDecode, ScaleUse::kDecode},
    GemmMode{MoeMode::kNvfp4Bf16, 0, ScaleUse::kDecode, ScaleUse::kNone},
    GemmMode{MoeMode::kNvfp4Fp8Exact, 128, ScaleUse::kDecode, ScaleUse::kGroup},
    GemmMode{MoeMode::kNvfp4Fp8Rounded, 128, ScaleUse::kDecode, ScaleUse::kGroup, true},
};

inline const GemmMode& gemm_mode(MoeMode mode) { return record_of(kGemmModes, mode, "MoE mode"); }

// Codes in memory; U8 is two E2M1 a byte. `scales`: the format whose block scales they have.
struct CodeStorage {
  DType dtype = DType::kBF16;
  std::optional<FormatId> scales;
};

inline CodeStorage storage_of(WeightFormat format) {
  switch (format) {
    case WeightFormat::kBf16:
      return {DType::kBF16, {}};
    case WeightFormat::kFp8Tensor:
      return {DType::kF8E4M3, {}};
    case WeightFormat::kFp8Block:
      return {DType::kF8E4M3, FormatId::kFp8Block128x128};
    case WeightFormat::kMxfp8:
      return {DType::kF8E4M3, FormatId::kMxfp8};
    case WeightFormat::kMxfp4:
      return {DType::kU8, FormatId::kMxfp4};
    case WeightFormat::kNvfp4:
      return {DType::kU8, FormatId::kNvfp4};
  }
  throw_bad_enumerator("weight format", static_cast<int>(format));
}

inline CodeStorage storage_of(RowFormat format) {
  CodeStorage storage{.dtype = value_dtype(format), .scales = {}};
  if (format == RowFormat::kFp8Group) storage.scales = FormatId::kFp8Block1x128;
  if (format == RowFormat::kMxfp8) storage.scales = FormatId::kMxfp8;
  if (storage.dtype == DType::kU8) storage.scales = FormatId::kNvfp4;
  return storage;
}

inline int code_bits(DType dtype) { return dtype == DType::kU8 ? 4 : bits(dtype); }

// Block scales of a matrix; block_cols is 0 where there are none.
struct ScaleGrid {
  ScaleType type = ScaleType::kF32;
  int64_t block_rows = 1;
  int64_t block_cols = 0;
  int64_t rows = 0;
  int64_t blocks = 0;  // Scales a row of the grid.

  [[nodiscard]] bool is_present() const { return block_cols > 0; }
  [[nodiscard]] int64_t size_bytes() const { return rows * blocks * bytes(type); }
};

inline ScaleGrid scale_grid(const CodeStorage& storage, int64_t rows, int64_t cols) {
  if (!storage.scales) return {};
  const FormatInfo& info = format_info(*storage.scales);
  return {.type = info.scale_type,
          .block_rows = info.block_rows,
          .block_cols = info.block_cols,
          .rows = ceil_div(rows, info.block_rows),
          .blocks = ceil_div(cols, info.block_cols)};
}

struct GemmShape {
  GemmMode mode;
  int64_t experts;
  int64_t rows;  // Of the weights of one expert: output columns.
  int64_t cols;
  int64_t group_cols;  // At most cols, unless cols is less than one group.
  int64_t groups;
  CodeStorage weights;
  CodeStorage inputs;
  ScaleGrid weight_scales;  // Of one expert.
  ScaleGrid input_scales;   // Of one row.

  explicit GemmShape(const GroupedGemmProblem& problem)
      : mode(gemm_mode(problem.mode)),
        experts(problem.experts),
        rows(problem.rows),
        cols(problem.cols),
        group_cols(mode.group_cols == 0 ? problem.cols : mode.group_cols),
        groups(ceil_div(problem.cols, group_cols)),
        weights(storage_of(moe_mode_info(problem.mode).weights)),
        inputs(storage_of(moe_mode_info(problem.mode).input)),
        weight_scales(scale_grid(weights, problem.rows, problem.cols)),
        input_scales(scale_grid(inputs, 1, problem.cols)) {}

  [[nodiscard]] int64_t expert_code_bytes() const {
    return rows * cols * code_bits(weights.dtype) / 8;
  }
  [[nodiscard]] int64_t code_bytes() const { return experts * expert_code_bytes(); }
  [[nodiscard]] int64_t scale_bytes() const { return experts * weight_scales.size_bytes(); }
  // Of either implementation's image: codes, then scales.
  [[nodiscard]] int64_t image_bytes() const { return code_bytes() + scale_bytes(); }
};

}  // namespace narrowfloat
