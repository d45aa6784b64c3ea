// Operations are the outer loop, then shapes, then formats, so that people find what they compare
// side by side.
#include "bench_cli/sweep_case.h"

#include <fmt/format.h>

#include "narrowfloat/error.h"

namespace narrowfloat::cli {
namespace {

constexpr int kNumLayouts = 4;

std::vector<FormatId> formats_of(const BenchArguments& arguments) {
  if (!arguments.formats.empty()) return arguments.formats;
  std::vector<FormatId> formats;
  for (const FormatInfo& info : all_formats()) formats.push_back(info.id);
  return formats;
}

std::vector<ScaleLayoutId> layouts_of(const SweepArguments& sweep, const FormatInfo& format) {
  if (sweep.layouts.empty() && !sweep.is_all_layouts) return {format.default_layout};
  std::vector<ScaleLayoutId> layouts;
  if (sweep.is_all_layouts) {
    for (int i = 0; i < kNumLayouts; ++i) layouts.push_back(static_cast<ScaleLayoutId>(i));
  } else {
    layouts = sweep.layouts;
  }
  std::erase_if(layouts, [&](ScaleLayoutId layout) { return !format.allows(layout); });
  return layouts;
}

struct Shape {
  int64_t rows;
  int64_t cols;
};

std::vector<Shape> shapes_of(const BenchArguments& arguments) {
  const SweepArguments& sweep = arguments.sweep;
  const std::vector<int64_t> rows = sweep.rows.empty() ? std::vector{arguments.rows} : sweep.rows;
  const std::vector<int64_t> cols = sweep.cols.empty() ? std::vector{arguments.cols} : sweep.cols;
  std::vector<Shape> shapes;
  for (const int64_t num_cols : cols) {
    for (const int64_t num_rows : rows) shapes.push_back({num_rows, num_cols});
  }
  return shapes;
}

// False for what the library would refuse anyway, and for what would be the same case twice.
bool is_possible(const SweepCase& what) {
  const FormatInfo& format = format_info(what.format);
  if (what.op == BenchOp::kRelayout) return source_layout(format.id, what.layout) != what.layout;
  if (what.op != BenchOp::kQuantize) return true;
  if (!what.is_scale_given && !has_tensor_scale(format.id)) return false;
  if (what.has_four_over_six && !format.has_global_scale) return false;
  if (what.source == QuantizeSource::kSmooth) return what.dtype == DType::kBF16;
  return what.source == QuantizeSource::kPlain || what.dtype != DType::kF32;
}

void add_shape(const BenchArguments& arguments, const SweepCase& what,
               std::vector<SweepCase>& cases) {
  for (const FormatId format : formats_of(arguments)) {
    for (const ScaleLayoutId layout : layouts_of(arguments.sweep, format_info(format))) {
      SweepCase one = what;
      one.format = format;
      one.layout = layout;
      if (is_possible(one)) cases.push_back(one);
    }
  }
}

void add_matrices(const BenchArguments& arguments, BenchOp op, std::vector<SweepCase>& cases) {
  const SweepArguments& sweep = arguments.sweep;
  SweepCase what;
  what.op = op;
  what.math = arguments.math;
  what.dtype = arguments.dtype;
  if (op == BenchOp::kQuantize) {
    what.is_scale_given = sweep.is_scale_given;
    what.has_four_over_six = sweep.has_four_over_six;
  }
  std::vector<QuantizeSource> sources = {QuantizeSource::kPlain};
  if (op == BenchOp::kQuantize && !sweep.sources.empty()) sources = sweep.sources;
  for (const QuantizeSource source : sources) {
    what.source = source;
    for (const Shape& shape : shapes_of(arguments)) {
      what.rows = shape.rows;
      what.cols = shape.cols;
      if (what.has_format()) {
        add_shape(arguments, what, cases);
      } else if (op < BenchOp::kGroupQuantize || is_small_case_possible(what)) {
        cases.push_back(what);
      }
    }
  }
}

void add_activations(const SweepArguments& sweep, std::vector<SweepCase>& cases) {
  for (const int64_t tokens : sweep.tokens) {
    SweepCase what;
    what.op = BenchOp::kActivation;
    what.activation = sweep.activation;
    what.tokens = tokens;
    what.cols = sweep.activation.inter;
    cases.push_back(what);
  }
}

}  // namespace

std::string_view name(BenchOp op) {
  switch (op) {
    case BenchOp::kQuantize:
      return "quantize";
    case BenchOp::kDequantize:
      return "dequantize";
    case BenchOp::kAmax:
      return "amax";
    case BenchOp::kRowAmax:
      return "row_amax";
    case BenchOp::kRelayout:
      return "relayout";
    case BenchOp::kActivation:
      return "activation";
    case BenchOp::kGroupQuantize:
      return "group_quantize";
    case BenchOp::kKvQuantize:
      return "kv_quantize";
    case BenchOp::kKvDequantize:
      return "kv_dequantize";
    case BenchOp::kKvAppend:
      return "kv_append";
    case BenchOp::kShuffle:
      return "shuffle";
    case BenchOp::kPackBits:
      return "pack_bits";
  }
  return "";
}

std::string_view name(QuantizeSource source) {
  switch (source) {
    case QuantizeSource::kPlain:
      return "plain";
    case QuantizeSource::kSiluMul:
      return "silu_mul";
    case QuantizeSource::kSmooth:
      return "smooth";
    case QuantizeSource::kRmsNorm:
      return "rmsnorm";
    case QuantizeSource::kAddRmsNorm:
      return "add_rmsnorm";
  }
  return "";
}

bool has_tensor_scale(FormatId format) {
  const FormatInfo& info = format_info(format);
  return (info.has_global_scale && !info.has_row_scale) || info.block_rows == 0;
}

ScaleLayoutId source_layout(FormatId format, ScaleLayoutId layout) {
  if (layout != ScaleLayoutId::kLinear) return ScaleLayoutId::kLinear;
  for (int i = 0; i < kNumLayouts; ++i) {
    const auto other = static_cast<ScaleLayoutId>(i);
    if (other != layout && format_info(format).allows(other)) return other;
  }
  return layout;
}

std::vector<SweepCase> cases_of(const BenchArguments& arguments) {
  std::vector<SweepCase> cases;
  const std::string& op = arguments.op;
  const auto add = [&](BenchOp which) { add_matrices(arguments, which, cases); };
  if (op.empty() || op == "quantize") add(BenchOp::kQuantize);
  if (op.empty() || op == "dequantize") add(BenchOp::kDequantize);
  if (op == "amax") {
    add(BenchOp::kAmax);
    add(BenchOp::kRowAmax);
  }
  if (op == "relayout") add(BenchOp::kRelayout);
  if (op == "activation") add_activations(arguments.sweep, cases);
  if (op == "group_quantize") add(BenchOp::kGroupQuantize);
  if (op == "kv_cache") {
    add(BenchOp::kKvQuantize);
    add(BenchOp::kKvDequantize);
    add(BenchOp::kKvAppend);
  }
  if (op == "shuffle") add(BenchOp::kShuffle);
  if (op == "pack_bits") add(BenchOp::kPackBits);
  if (cases.empty()) {
    throw Error(ErrorKind::kInvalidArgument,
                "bench: no case is left: no --format has that --layout, --source, --dtype, "
                "--encode-scale or --four-over-six, or the operation no such shape or --dtype");
  }
  return cases;
}

}  // namespace narrowfloat::cli
