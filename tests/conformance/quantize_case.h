// One conformance case of the quantizers as data: everything that a call of any fused form can ask
// for, drawn from a seed. Only valid requests are drawn.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ops/quantize/quantize_problem.h"
#include "support/fills.h"

namespace narrowfloat::testing {

struct QuantizeCase {
  uint64_t seed = 0;
  FormatId format = FormatId::kNvfp4;
  ScaleLayoutId layout = ScaleLayoutId::kLinear;
  MathMode math = MathMode::kExact;
  RowSourceKind source = RowSourceKind::kPlain;
  DType dtype = DType::kBF16;
  int64_t batch = 1;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t alignment = 32;
  int64_t gap = 0;           // Elements between input rows.
  int64_t misalignment = 0;  // Misalignment of the outputs.
  int input_rank = 2;
  Fill fill = Fill::kNormal;

  // Options; encode_scales empty for none.
  std::optional<float> encode_scale;
  std::vector<float> encode_scales;
  FourOverSix four_over_six;
  std::optional<float> base_decode_scale;
  bool is_base_a_tensor = false;  // Beside the input.
  std::optional<std::vector<int32_t>> row_list;
  std::optional<std::vector<int32_t>> valid_rows;
  std::vector<int64_t> row_offsets;
  Ue8m0Rounding mx_scale = Ue8m0Rounding::kUp;
  Fp8ScaleRule fp8_rule = Fp8ScaleRule::kReciprocal;
  std::optional<float> fp8_eps;
  std::optional<float> fp8_decode_scale;
  float norm_eps = 1e-6F;
  bool has_norm_output = false;
  std::optional<ScaleLayoutId> extra_layout;

  [[nodiscard]] int64_t input_cols() const {
    return source == RowSourceKind::kSiluMul ? 2 * cols : cols;
  }
  [[nodiscard]] bool is_norm() const {
    return source == RowSourceKind::kRmsNorm || source == RowSourceKind::kAddRmsNorm;
  }
  // Number of decode scales the call stores.
  [[nodiscard]] int64_t num_global_scales() const;
  // Whether a row is quantized at all.
  [[nodiscard]] bool is_visited(int64_t batch_idx, int64_t row) const;
  // Row in the packed scales that a row's scales go to.
  [[nodiscard]] int64_t scale_row(int64_t row) const;
};

QuantizeCase sample_quantize_case(FormatId format, ScaleLayoutId layout, MathMode math,
                                  uint64_t seed);
std::string to_string(const QuantizeCase& test_case);

}  // namespace narrowfloat::testing
