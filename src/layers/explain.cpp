// explain(): the ordered implementations of one operation for a problem without data.
#include <algorithm>
#include <array>
#include <optional>

#include <fmt/ranges.h>

#include "base/int_math.h"
#include "base/throw_error.h"
#include "narrowfloat/runtime.h"
#include "ops/amax/amax_problem.h"
#include "ops/dequantize/dequantize_problem.h"
#include "ops/group_quantize/group_quantize_problem.h"
#include "ops/kv_cache/kv_problem.h"
#include "ops/pack_bits/pack_bits_problem.h"
#include "ops/quantize/quantize_problem.h"
#include "ops/quantize/scale_inversion.h"
#include "ops/relayout/relayout_problem.h"
#include "ops/shuffle/shuffle_problem.h"
#include "runtime/dispatch.h"

namespace narrowfloat {
namespace {

QuantizedLayout layout_of(const ExplainRequest& request) {
  return quantized_layout(request.format, request.rows, request.cols,
                          {.scale_layout = request.scale_layout, .batch = request.batch});
}

// Refuses types that the call would refuse, in the call's words.
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

// The problem of a relayout from linear to the requested layout.
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

// The operations below have no format; their shapes are [batch * rows, cols]. Bits of elements of
// any type, and each extent alone, are counted in 63 bits.
void require_shape(const ExplainRequest& request) {
  std::optional<int64_t> bits_in_all = 64;
  for (const int64_t extent : {request.batch, request.rows, request.cols}) {
    if (extent < 0) throw_invalid("shape: expected no negative extent, got {}", extent);
    if (bits_in_all) bits_in_all = checked_mul(*bits_in_all, std::max<int64_t>(extent, 1));
  }
  if (!bits_in_all) {
    throw_invalid("shape: {} x {} x {} elements exceed 2^63 bits", request.batch, request.rows,
                  request.cols);
  }
}

constexpr int64_t kColsOfGroup = 128;
constexpr int64_t kColsOfKvBlock = 16;
constexpr int64_t kShuffledRows = 32;

void require_multiple(std::string_view what, int64_t value, int64_t divisor) {
  if (value % divisor != 0) {
    throw_invalid("{}: expected a multiple of {}, got {}", what, divisor, value);
  }
}

Explanation explain_shuffle(const ExplainRequest& request) {
  require_multiple("rows", request.rows, kShuffledRows);
  const ShuffleProblem problem{.device = request.device,
                               .rows = request.batch * request.rows,
                               .row_bytes = request.cols * bits(request.dtype) / 8,
                               .group_rows = kShuffledRows};
  return explain_candidates("shuffle", shuffle_impls(), problem);
}

Explanation explain_pack_bits(const ExplainRequest& request) {
  const PackBitsProblem problem{.device = request.device,
                                .elements = request.batch * request.rows * request.cols};
  return explain_candidates("pack_bits", pack_bits_impls(), problem);
}

// The problem has one scale per element.
Explanation explain_invert_scales(const ExplainRequest& request) {
  const ScaleInversionProblem problem{.device = request.device,
                                      .math = request.math,
                                      .count = request.batch * request.rows * request.cols};
  return explain_candidates("invert_scales", scale_inversion_impls(), problem);
}

// The problem has E4M3 codes and scales row by row.
Explanation explain_group_quantize(const ExplainRequest& request) {
  require_float(request, false);
  require_multiple("cols", request.cols, kColsOfGroup);
  const GroupQuantizeProblem problem{.input = request.dtype,
                                     .device = request.device,
                                     .rows = request.batch * request.rows,
                                     .cols = request.cols,
                                     .group_size = kColsOfGroup};
  return explain_candidates("group_quantize", group_quantize_impls(), problem);
}

Explanation explain_kv_quantize(const ExplainRequest& request) {
  if (request.dtype != DType::kBF16 && request.dtype != DType::kF16) {
    throw_invalid("dtype: expected BF16 or F16, got {}", name(request.dtype));
  }
  require_multiple("cols", request.cols, kColsOfKvBlock);
  const KvQuantizeProblem problem{.input = request.dtype,
                                  .math = request.math,
                                  .device = request.device,
                                  .extents = {request.batch * request.rows, 1, 1},
                                  .blocks = {request.cols / kColsOfKvBlock, 0}};
  return explain_candidates("kv_quantize", kv_quantize_impls(), problem);
}

Explanation explain_kv_dequantize(const ExplainRequest& request) {
  require_float(request, false);
  require_multiple("cols", request.cols, kColsOfKvBlock);
  const KvDequantizeProblem problem{.output = request.dtype,
                                    .device = request.device,
                                    .extents = {request.batch * request.rows, 1, 1},
                                    .blocks = {request.cols / kColsOfKvBlock, 0}};
  return explain_candidates("kv_dequantize", kv_dequantize_impls(), problem);
}

// The problem has a page of one head for each batch.
Explanation explain_kv_reorder(const ExplainRequest& request) {
  require_multiple("rows", request.rows, 4);
  require_multiple("cols", request.cols, 4 * kColsOfKvBlock);
  const KvReorderProblem problem{.device = request.device,
                                 .pages = request.batch,
                                 .heads = 1,
                                 .tokens = request.rows,
                                 .blocks = request.cols / kColsOfKvBlock};
  return explain_candidates("kv_reorder", kv_reorder_impls(), problem);
}

struct Explainer {
  std::string_view op;
  bool has_formats;
  Explanation (*explain)(const ExplainRequest& request);
};

// explain_moe() explains the stages of a layer.
constexpr std::array kExplainers{Explainer{"quantize", true, explain_quantize},
                                 Explainer{"dequantize", true, explain_dequantize},
                                 Explainer{"relayout", true, explain_relayout},
                                 Explainer{"amax", true, explain_amax},
                                 Explainer{"shuffle", false, explain_shuffle},
                                 Explainer{"pack_bits", false, explain_pack_bits},
                                 Explainer{"group_quantize", false, explain_group_quantize},
                                 Explainer{"kv_quantize", false, explain_kv_quantize},
                                 Explainer{"kv_dequantize", false, explain_kv_dequantize},
                                 Explainer{"kv_reorder", false, explain_kv_reorder},
                                 Explainer{"invert_scales", false, explain_invert_scales}};

const Explainer& find_explainer(std::string_view op) {
  for (const Explainer& explainer : kExplainers) {
    if (explainer.op == op) return explainer;
  }
  throw_invalid("operation: expected one of {}, got \"{}\"", fmt::join(operations(), ", "), op);
}

}  // namespace

std::vector<std::string_view> operations() {
  std::vector<std::string_view> names;
  names.reserve(kExplainers.size());
  for (const Explainer& explainer : kExplainers) names.push_back(explainer.op);
  return names;
}

bool has_formats(std::string_view op) { return find_explainer(op).has_formats; }

Explanation explain(std::string_view op, const ExplainRequest& request) {
  const Explainer& explainer = find_explainer(op);
  if (!explainer.has_formats) require_shape(request);
  return explainer.explain(request);
}

}  // namespace narrowfloat
