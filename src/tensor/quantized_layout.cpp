// Buffer sizes of quantized tensors, and views over buffers of those sizes.
#include "base/int_math.h"
#include "base/throw_error.h"
#include "narrowfloat/format.h"
#include "tensor/block_math.h"

namespace narrowfloat {
namespace {

int64_t product(std::string_view what, std::initializer_list<int64_t> factors) {
  int64_t result = 1;
  for (const int64_t factor : factors) {
    const auto next = checked_mul(result, factor);
    if (!next) throw_invalid("{}: more than 2^63", what);
    result = *next;
  }
  return result;
}

void check_extents(const FormatInfo& info, int64_t rows, int64_t cols, ScaleLayoutId scale_layout,
                   const QuantizedLayoutOptions& options) {
  if (rows < 0) throw_invalid("rows: expected >= 0, got {}", rows);
  if (cols < 0) throw_invalid("cols: expected >= 0, got {}", cols);
  if (options.batch < 0) throw_invalid("batch: expected >= 0, got {}", options.batch);
  const int64_t multiple = column_multiple(info);
  if (cols % multiple != 0) {
    throw_invalid("cols: {} needs a multiple of {}, got {}; pad the tensor with zero columns",
                  info.name, multiple, cols);
  }
  if (options.alignment <= 0 || options.alignment % 32 != 0) {
    throw_invalid("alignment: expected a positive multiple of 32, got {}", options.alignment);
  }
  if (options.alignment != 32 && info.id != FormatId::kMxfp8) {
    throw_invalid("alignment: only mxfp8 pads its columns, got {} for {}", options.alignment,
                  info.name);
  }
  if (options.groups != 0 && (info.id != FormatId::kFp8Block1x128 || options.groups < 0)) {
    throw_invalid("groups: expected 0, or a positive count for fp8_1x128, got {} for {}",
                  options.groups, info.name);
  }
  if (options.groups > 0 && (options.batch != 1 || scale_layout != ScaleLayoutId::kMnMajor)) {
    throw_invalid("groups: need batch 1 and layout mn_major, got batch {} and {}", options.batch,
                  name(scale_layout));
  }
  if (options.global_scale_axis != ScaleAxis::kTensor && info.id != FormatId::kNvfp4) {
    throw_invalid("global_scale_axis: only nvfp4 has a choice, got {}", info.name);
  }
  // Each group may add 31 rows of padding.
  if (options.groups > (INT64_MAX - rows) / 31) {
    throw_invalid("groups: {} groups of {} rows in all exceed 2^63 scale rows", options.groups,
                  rows);
  }
}

}  // namespace

QuantizedLayout quantized_layout(FormatId format, int64_t rows, int64_t cols,
                                 const QuantizedLayoutOptions& options) {
  const FormatInfo& info = format_info(format);
  const ScaleLayoutId scale_layout = options.scale_layout.value_or(info.default_layout);
  check_extents(info, rows, cols, scale_layout, options);
  if (!info.allows(scale_layout)) {
    throw_invalid("scale layout: {} does not allow {}; its default is {}", info.name,
                  name(scale_layout), name(info.default_layout));
  }
  if (cols > INT64_MAX - options.alignment) throw_invalid("cols: {} exceeds 2^63 padded", cols);
  const int64_t value_cols = info.id == FormatId::kMxfp8 ? round_up(cols, options.alignment) : cols;
  ScaleExtents extents = scale_extents(info, rows, value_cols);
  if (options.groups > 0) extents.rows = grouped_scale_row(rows, options.groups);

  QuantizedLayout layout{};
  layout.format = format;
  layout.scale_layout = scale_layout;
  layout.batch = options.batch;
  layout.rows = rows;
  layout.cols = cols;
  layout.value_cols = value_cols;
  const int64_t row_bytes = info.element_bits == 4 ? value_cols / 2 : value_cols;
  layout.values_bytes = product("values", {options.batch, rows, row_bytes});
  layout.scale_rows = extents.rows;
  layout.scale_blocks = extents.blocks;
  layout.scale_count = product(
      "scales", {options.batch, scale_image_size(scale_layout, extents.rows, extents.blocks)});
  layout.scales_bytes = product("scales", {layout.scale_count, bytes(info.scale_type)});
  layout.global_scale_axis = options.global_scale_axis;
  layout.global_scales = info.has_global_scale ? 1 : 0;
  if (info.has_row_scale) layout.global_scales = product("row scales", {options.batch, rows});
  if (options.global_scale_axis == ScaleAxis::kRow) layout.global_scales = rows;
  if (options.global_scale_axis == ScaleAxis::kBatch) layout.global_scales = options.batch;
  return layout;
}

QuantizedView QuantizedLayout::bind(void* values, void* scales, float* global_scale,
                                    Device device) const {
  const FormatInfo& info = format_info(format);
  QuantizedView view;
  view.format = format;
  view.batch = batch;
  view.rows = rows;
  view.cols = cols;
  const bool is_packed = info.element_bits == 4;
  view.values =
      TensorView::contiguous(values, is_packed ? DType::kU8 : DType::kF8E4M3,
                             {batch, rows, is_packed ? value_cols / 2 : value_cols}, device);
  view.scales = {.data = scales,
                 .type = info.scale_type,
                 .layout = scale_layout,
                 .device = device,
                 .batch = batch,
                 .rows = scale_rows,
                 .blocks = scale_blocks,
                 .capacity = scale_count};
  if (info.has_global_scale) {
    const bool is_per_batch = global_scale_axis == ScaleAxis::kBatch;
    const std::initializer_list<int64_t> per_batch = {global_scales, 1};
    const std::initializer_list<int64_t> flat = {global_scales};
    view.global_scale =
        TensorView::contiguous(global_scale, DType::kF32, is_per_batch ? per_batch : flat, device);
  }
  return view;
}

}  // namespace narrowfloat
