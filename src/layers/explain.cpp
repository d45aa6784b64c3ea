// explain(): the ordered implementations of one operation for a problem without data.
#include <array>

#include "base/throw_error.h"
#include "narrowfloat/runtime.h"
#include "ops/amax/amax_problem.h"
#include "ops/dequantize/dequantize_problem.h"
#include "ops/quantize/quantize_problem.h"
#include "ops/relayout/relayout_problem.h"

namespace narrowfloat {
namespace {

QuantizedLayout layout_of(const ExplainRequest& request) {
  return quantized_layout(request.format, request.rows, request.cols,
                          {.scale_layout = request.scale_layout, .batch = request.batch});
}

Explanation explain_quantize(const ExplainRequest& request) {
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
  const AmaxProblem problem{.input = request.dtype,
                            .device = request.device,
                            .rows = request.batch * request.rows,
                            .cols = request.cols,
                            .per_row = format_info(request.format).has_row_scale};
  return explain_candidates("amax", amax_impls(), problem);
}

struct Operation {
  std::string_view name;
  Explanation (*explain)(const ExplainRequest& request);
};

constexpr std::array kOperations{
    Operation{"quantize", explain_quantize}, Operation{"dequantize", explain_dequantize},
    Operation{"relayout", explain_relayout}, Operation{"amax", explain_amax}};

}  // namespace

std::vector<std::string_view> operations() {
  std::vector<std::string_view> names;
  names.reserve(kOperations.size());
  for (const Operation& operation : kOperations) names.push_back(operation.name);
  return names;
}

Explanation explain(std::string_view op, const ExplainRequest& request) {
  std::string names;
  for (const Operation& operation : kOperations) {
    if (operation.name == op) return operation.explain(request);
    names += names.empty() ? "" : ", ";
    names += operation.name;
  }
  throw_invalid("operation: expected one of {}, got \"{}\"", names, op);
}

}  // namespace narrowfloat
