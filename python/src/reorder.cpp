// Row shuffles, packing of bits and 8-bit group quantization.
#include <string_view>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string_view.h>

#include "narrowfloat/error.h"
#include "narrowfloat/group_quantize.h"
#include "narrowfloat/pack_bits.h"
#include "narrowfloat/shuffle.h"
#include "python/src/arrays.h"
#include "python/src/bindings.h"
#include "python/src/choices.h"
#include "python/src/streams.h"

namespace narrowfloat::python {
namespace {

using nb::literals::operator""_a;

void run_shuffle_rows(nb::handle input, nb::handle output, int64_t epilogue_tile_m,
                      bool is_inverse) {
  const Array from = input_array("input", input, DType::kU8);
  const Array to = output_array("out", output, DType::kU8);
  const Stream stream = current_stream(from);
  const nb::gil_scoped_release unlocked;
  (is_inverse ? unshuffle_rows : shuffle_rows)(from.view, to.view, epilogue_tile_m, stream);
}

// One-byte scales in any layout, in a dense array.
ScaleView scales_of(std::string_view argument, const TensorView& view, ScaleLayoutId layout,
                    int64_t batch, int64_t rows, int64_t blocks) {
  if (view.dtype != DType::kU8 || !is_dense(view)) {
    throw Error(ErrorKind::kInvalidArgument,
                std::string(argument) + ": expected a dense uint8 array, got " + to_string(view));
  }
  return {.data = view.data,
          .type = ScaleType::kE4M3,
          .layout = layout,
          .device = view.device,
          .batch = batch,
          .rows = rows,
          .blocks = blocks,
          .capacity = view.num_elements()};
}

void run_shuffle_scales(nb::handle input, nb::handle output, int64_t batch, int64_t rows,
                        int64_t blocks, int64_t epilogue_tile_m, bool is_inverse) {
  const Array from = input_array("scales", input, DType::kU8);
  const Array to = output_array("out", output, DType::kU8);
  constexpr auto kPlain = ScaleLayoutId::kLinear;
  constexpr auto kShuffled = ScaleLayoutId::kSwizzled128x4;
  const ScaleView in =
      scales_of("scales", from.view, is_inverse ? kShuffled : kPlain, batch, rows, blocks);
  const ScaleView out =
      scales_of("out", to.view, is_inverse ? kPlain : kShuffled, batch, rows, blocks);
  const Stream stream = current_stream(from);
  const nb::gil_scoped_release unlocked;
  // The bytes move the same way for every format with scales of one byte.
  (is_inverse ? unshuffle_scales : shuffle_scales)(FormatId::kNvfp4, in, out, epilogue_tile_m,
                                                   stream);
}

BitOrder parse_order(std::string_view text) {
  return parse_choice<BitOrder>("order", text,
                                {{"big", BitOrder::kBig}, {"little", BitOrder::kLittle}});
}

void run_pack_bits(nb::handle input, nb::handle output, std::string_view order) {
  const Array elements = input_array("input", input, DType::kU8);
  const Array bytes = output_array("out", output, DType::kU8);
  const BitOrder bits = parse_order(order);
  const Stream stream = current_stream(elements);
  const nb::gil_scoped_release unlocked;
  pack_bits(elements.view, bytes.view, bits, stream);
}

void run_segment_pack_bits(nb::handle input, nb::handle offsets, nb::handle output,
                           nb::handle output_offsets, std::string_view order) {
  const Array elements = input_array("input", input, DType::kU8);
  const Array starts = input_array("offsets", offsets);
  const Array bytes = output_array("out", output, DType::kU8);
  const Array new_starts = output_array("out_offsets", output_offsets);
  const BitOrder bits = parse_order(order);
  const Stream stream = current_stream(elements);
  const nb::gil_scoped_release unlocked;
  segment_pack_bits(elements.view, starts.view, bytes.view, new_starts.view, bits, stream);
}

void run_quantize_group_8bit(nb::handle input, nb::handle values, nb::handle scales,
                             int64_t group_size, float eps, std::string_view scale_order,
                             bool power_of_two_scales, std::string_view dtype) {
  const DType code = parse_choice<DType>(
      "dtype", dtype,
      {{"float8_e4m3fn", DType::kF8E4M3}, {"float8_e5m2", DType::kF8E5M2}, {"int8", DType::kI8}});
  const GroupQuantizeOptions options{
      .group_size = group_size,
      .eps = eps,
      .scale_order = parse_choice<GroupScaleOrder>(
          "scale_order", scale_order,
          {{"row_major", GroupScaleOrder::kRowMajor},
           {"column_major", GroupScaleOrder::kColumnMajor},
           {"column_major_aligned", GroupScaleOrder::kColumnMajorAligned}}),
      .power_of_two_scales = power_of_two_scales};
  const Array numbers = input_array("input", input);
  const Array codes = output_array("out", values, code);
  const Array factors = output_array("out_scales", scales);
  const Stream stream = current_stream(numbers);
  const nb::gil_scoped_release unlocked;
  quantize_group_8bit(numbers.view, codes.view, factors.view, options, stream);
}

}  // namespace

void bind_reorder(nb::module_& module) {
  module.def("shuffle_rows", &run_shuffle_rows);
  module.def("shuffle_scales", &run_shuffle_scales);
  module.def("pack_bits", &run_pack_bits);
  module.def("segment_pack_bits", &run_segment_pack_bits);
  module.def("segment_packed_bytes", &segment_packed_bytes, "elements"_a, "segments"_a,
             "The most bytes that packed segments may need.");
  module.def("quantize_group_8bit", &run_quantize_group_8bit);
}

}  // namespace narrowfloat::python
