// A quantization as data: QuantizeProblem describes what is computed (printable, no pointers),
// QuantizeArgs the buffers. Public calls are checked and lowered to these two, and every
// implementation works from them alone.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "formats/block_format.h"
#include "narrowfloat/quantize.h"
#include "runtime/support.h"

namespace narrowfloat {

// The operation that produces the rows to quantize.
enum class RowSourceKind : int {
  kPlain = 0,
  kSiluMul = 1,
  kSmooth = 2,
  kRmsNorm = 3,
  kAddRmsNorm = 4,
};
std::string_view name(RowSourceKind kind);
// A norm needs a statistic of the whole row before the first element.
inline bool is_norm(RowSourceKind source) {
  return source == RowSourceKind::kRmsNorm || source == RowSourceKind::kAddRmsNorm;
}

// The source of encode scales, and the axis along which they vary.
enum class EncodeScaleSource : int { kNone = 0, kHost = 1, kTensor = 2, kAmax = 3 };
enum class EncodeScaleAxis : int { kTensor = 0, kRow = 1, kBatch = 2 };

struct QuantizeProblem {
  FormatId format = FormatId::kNvfp4;
  ScaleLayoutId layout = ScaleLayoutId::kLinear;
  MathMode math = MathMode::kExact;
  DType input = DType::kBF16;
  RowSourceKind source = RowSourceKind::kPlain;
  Device device;
  int64_t batch = 1;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t value_cols = 0;
  EncodeScaleSource encode_source = EncodeScaleSource::kNone;
  EncodeScaleAxis encode_axis = EncodeScaleAxis::kTensor;
  FourOverSix four_over_six;
  BlockRules rules;
  bool has_row_list = false;
  bool has_valid_rows = false;
  bool has_fp8_decode_scale = false;
  int64_t groups = 0;  // Number of row groups of FP8 1x128.
};
std::string to_string(const QuantizeProblem& problem);

// FP8 rules without a fast form, and a given scale, use the numerics of `exact` (spec 6.7, 6.9).
inline MathMode effective_math(const QuantizeProblem& problem) {
  const bool has_fast_form =
      format_info(problem.format).scale_type != ScaleType::kF32 ||
      (problem.rules.fp8_rule == Fp8ScaleRule::kReciprocal && !problem.has_fp8_decode_scale);
  return has_fast_form ? problem.math : MathMode::kExact;
}

struct QuantizeArgs {
  const void* input = nullptr;     // [batch, rows, cols], or 2 * cols for SiLU.
  int64_t input_batch_stride = 0;  // Strides count elements.
  int64_t input_stride = 0;
  const void* vector = nullptr;  // Smoothing factors or norm weight, [cols].
  void* residual = nullptr;      // [batch * rows, cols], updated in place.
  int64_t residual_stride = 0;
  float norm_eps = 0;
  void* norm_output = nullptr;  // [batch * rows, cols], dense; optional.

  uint8_t* values = nullptr;
  int64_t value_row_bytes = 0;
  ScaleView scales;
  ScaleView extra_scales;  // An optional second scale tensor.
  float* global_scale = nullptr;

  float encode_scale = 1.0F;
  const float* encode_scales = nullptr;
  float base_decode_scale = 0.0F;
  const float* device_base =
      nullptr;  // Replaces base_decode_scale where only the GPU has the value.
  std::optional<float> fp8_decode_scale;
  std::span<const int32_t> row_list;
  std::span<const int32_t> valid_rows;
  std::span<const int64_t> row_offsets;
};

struct QuantizeImpl {
  std::string_view name;
  Support (*supports)(const QuantizeProblem& problem);
  void (*run)(const QuantizeProblem& problem, const QuantizeArgs& args, Stream stream);
};

// The implementations, fastest first, the oracle last.
std::span<const QuantizeImpl> quantize_impls();

}  // namespace narrowfloat
