// The arithmetic of a grouped GEMM as data: how each mode uses its block scales, and the extents
// that follow from a mode and a weight shape.
//
// A mode splits K into groups and uses each side's block scales in one of two ways: when it decodes
// (the factor of a value, before it is multiplied) or per group (the factor of a group's sum).
#pragma once

#include <array>
#include <cstdint>

#include "base/int_math.h"
#include "base/name_table.h"
#include "narrowfloat/moe_types.h"
#include "ops/grouped_gemm/grouped_gemm_problem.h"
#include "tensor/code_storage.h"

namespace narrowfloat {

enum class ScaleUse : int { kNone = 0, kDecode = 1, kGroup = 2 };

struct GemmMode {
  MoeMode id;
  int64_t group_cols;  // 0: the whole K is one group.
  ScaleUse weight_scale;
  ScaleUse row_scale;
  bool rounds_weights = false;  // Rounds to E4M3 per 1x128 (moe spec 11.3).
  bool has_int8_rows = false;   // Rounds rows to int8 per 1x32 (int8_rows.h).
};

// The modes in the order of MoeMode (moe spec 6.4).
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
    GemmMode{MoeMode::kMxfp4Fp8Token, 0, ScaleUse::kDecode, ScaleUse::kNone},
    GemmMode{MoeMode::kNvfp4Fp8Token, 0, ScaleUse::kDecode, ScaleUse::kNone, true},
    GemmMode{MoeMode::kMxfp4Int8, 32, ScaleUse::kGroup, ScaleUse::kGroup, false, true},
    GemmMode{MoeMode::kNvfp4Int8, 16, ScaleUse::kGroup, ScaleUse::kGroup, false, true},
};

inline const GemmMode& gemm_mode(MoeMode mode) { return record_of(kGemmModes, mode, "MoE mode"); }

struct GemmShape {
  GemmMode mode;
  int64_t experts;
  int64_t rows;  // Weight rows of one expert: output columns (n).
  int64_t cols;
  int64_t group_cols;  // At most cols, unless cols is less than one group.
  int64_t groups;
  CodeStorage weights;
  CodeStorage inputs;
  ScaleGrid weight_scales;  // The grid of one expert.
  ScaleGrid input_scales;   // The grid of one row.

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
  // Bytes of the packed weights of either CPU implementation: codes, then scales.
  [[nodiscard]] int64_t packed_bytes() const { return code_bytes() + scale_bytes(); }
};

}  // namespace narrowfloat
