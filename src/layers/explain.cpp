// explain(): the ordered implementations of one operation for a problem without data.
#include <array>

#include <fmt/ranges.h>

#include "base/throw_error.h"
#include "narrowfloat/runtime.h"
#include "ops/amax/amax_problem.h"
#include "ops/dequantize/dequantize_problem.h"
#include "ops/quantize/quantize_problem.h"
#include "ops/relayout/relayout_problem.h"
#include "runtime/dispatch.h"

namespace narrowfloat {
namespace {

QuantizedLayout layout_of(const ExplainRequest& request) {
  return quantized_layout(request.format, request.rows, request.cols,
                          {.scale_layout = request.scale_layout, .batch = request.batch});
}

// The types a call would be refused for, in the words of the call.
void require_float(const ExplainRequest& request, bool takes_fp8) {
  const DType dtype = request.dtype;
  if (dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16) return;
  if (takes_fp8 && dtype == DType::kF8E4M3) return;
  throw_invalid("dtype: expected F32, BF16{} F16{}, got {}", takes_fp8 ? "," : " or",
                takes_fp8 ? " or F8_E4M3" : "", name(dtype));
}

Explanation explain_quantize(const ExplainRequest& request) {
  const bool takes_fp8 = request.format == FormatId::kNvfp4 || request.format == FormatId::kMxfp4;
  require_float(request, takes_fp8);
  const QuantizedLayout layout = layout_of(request);
  QuantizeProblem problem;
  problem.format = request.format;
  problem.layout = layout.scale_layout;
  problem.math = request.math;
  problem.input = request.dtype;
  problem.device = request.device;
  problem.batch = request.batch;
  problem.rows = request.rows;
  problem.cols = request.cols;
  problem.value_cols = layout.value_cols;
  return explain_candidates("quantize", quantize_impls(), problem);
}

Explanation explain_dequantize(const ExplainRequest& request) {
  require_float(request, false);
  DequantizeProblem problem;
  problem.format = request.format;
  problem.layout = layout_of(request).scale_layout;
  problem.output = request.dtype;
  problem.device = request.device;
  problem.batch = request.batch;
  problem.rows = request.rows;
  problem.cols = request.cols;
  return explain_candidates("dequantize", dequantize_impls(), problem);
}

// From linear to the layout that is asked for.
Explanation explain_relayout(const ExplainRequest& request) {
  const QuantizedLayout layout = layout_of(request);
  const RelayoutProblem problem{.type = format_info(request.format).scale_type,
                                .from = ScaleLayoutId::kLinear,
                                .to = layout.scale_layout,
                                .device = request.device,
                                .batch = request.batch,
                                .rows = layout.scale_rows,
                                .blocks = layout.scale_blocks};
  return explain_candidates("relayout", relayout_impls(), problem);
}

Explanation explain_amax(const ExplainRequest& request) {
  require_float(request, false);
  layout_of(request);  // Refuses impossible shapes.
  const AmaxProblem problem{.input = request.dtype,
                            .device = request.device,
                            .rows = request.batch * request.rows,
                            .cols = request.cols,
                            .per_row = format_info(request.format).has_row_scale};
  return explain_candidates("amax", amax_impls(), problem);
}

using Explain = Explanation (*)(const ExplainRequest& request);

// The first of kOperations, in their order; explain_moe() has the others.
constexpr std::array<Explain, 4> kExplain{explain_quantize, explain_dequantize, explain_relayout,
                                          explain_amax};

}  // namespace

std::vector<std::string_view> operations() {
  return {kOperations.begin(), kOperations.begin() + kExplain.size()};
}

Explanation explain(std::string_view op, const ExplainRequest& request) {
  for (size_t i = 0; i < kExplain.size(); ++i) {
    if (kOperations[i] == op) return kExplain[i](request);
  }
  throw_invalid("operation: expected one of {}, got \"{}\"", fmt::join(operations(), ", "), op);
}

}  // namespace narrowfloat
