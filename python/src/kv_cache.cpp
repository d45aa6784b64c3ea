// KV caches: the functions of narrowfloat/kv_cache.h. A cache is a dictionary of arrays.
#include "narrowfloat/kv_cache.h"

#include <string_view>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string_view.h>

#include "python/src/arrays.h"
#include "python/src/bindings.h"
#include "python/src/choices.h"
#include "python/src/streams.h"

namespace narrowfloat::python {
namespace {

using nb::literals::operator""_a;

// Views of a call and the arrays that they point into.
class Arrays {
 public:
  TensorView input(std::string_view argument, nb::handle object) {
    arrays_.push_back(input_array(argument, object, DType::kU8));
    return arrays_.back().view;
  }
  TensorView output(std::string_view argument, nb::handle object) {
    arrays_.push_back(output_array(argument, object, DType::kU8));
    return arrays_.back().view;
  }
  // None, a number, or a float32 array of one.
  KvScale scale(std::string_view argument, nb::handle object) {
    if (object.is_none()) return {};
    if (nb::isinstance<nb::float_>(object) || nb::isinstance<nb::int_>(object)) {
      return static_cast<float>(nb::cast<double>(object));
    }
    return input(argument, object);
  }
  // The stream of the first array, whose device counts.
  [[nodiscard]] Stream stream() const { return current_stream(arrays_.front()); }

 private:
  std::vector<Array> arrays_;
};

KvLayout parse_layout(std::string_view text) {
  return parse_choice<KvLayout>("layout", text, {{"NHD", KvLayout::kNhd}, {"HND", KvLayout::kHnd}});
}

// k, v, k_scales, v_scales: arrays. k_decode_scale, v_decode_scale: decode scales.
PagedKvCache cache_of(const NamedArrays& source, std::string_view layout, bool is_output,
                      Arrays& arrays) {
  const auto part = [&](const char* name) {
    return is_output ? arrays.output(name, source[name]) : arrays.input(name, source[name]);
  };
  PagedKvCache cache{.k = {part("k"), part("k_scales")},
                     .v = {part("v"), part("v_scales")},
                     .layout = parse_layout(layout),
                     .k_scale = {},
                     .v_scale = {}};
  cache.k_scale = arrays.scale("k_scale", source["k_scale"]);
  cache.v_scale = arrays.scale("v_scale", source["v_scale"]);
  return cache;
}

void run_kv_quantize(nb::handle input, nb::handle values, nb::handle scales,
                     nb::handle decode_scale, std::string_view math) {
  Arrays arrays;
  const TensorView numbers = arrays.input("input", input);
  const KvCodes codes{arrays.output("values", values), arrays.output("scales", scales)};
  const KvScale scale = arrays.scale("decode_scale", decode_scale);
  const MathMode mode = parse_math_mode(math);
  const Stream stream = arrays.stream();
  const nb::gil_scoped_release unlocked;
  kv_quantize(numbers, codes, scale, mode, stream);
}

void run_kv_dequantize(nb::handle values, nb::handle scales, nb::handle output,
                       nb::handle decode_scale) {
  Arrays arrays;
  const KvCodes codes{arrays.input("values", values), arrays.input("scales", scales)};
  const TensorView numbers = arrays.output("out", output);
  const KvScale scale = arrays.scale("decode_scale", decode_scale);
  const Stream stream = arrays.stream();
  const nb::gil_scoped_release unlocked;
  kv_dequantize(codes, numbers, scale, stream);
}

void run_kv_dequantize_paged(const NamedArrays& cache, std::string_view layout,
                             nb::handle block_tables, nb::handle seq_lens, nb::handle output_k,
                             nb::handle output_v) {
  Arrays arrays;
  const PagedKvCache paged = cache_of(cache, layout, false, arrays);
  const TensorView tables = arrays.input("block_tables", block_tables);
  const TensorView lengths = arrays.input("seq_lens", seq_lens);
  const TensorView keys = arrays.output("output_k", output_k);
  const TensorView values = arrays.output("output_v", output_v);
  const Stream stream = arrays.stream();
  const nb::gil_scoped_release unlocked;
  kv_dequantize_paged(paged, tables, lengths, keys, values, stream);
}

// places: slots, or batch_indices, positions, indices and indptr.
void run_kv_append(nb::handle key, nb::handle value, const NamedArrays& places,
                   const NamedArrays& cache, std::string_view layout, std::string_view math) {
  Arrays arrays;
  const TensorView keys = arrays.input("key", key);
  const TensorView values = arrays.input("value", value);
  const PagedKvCache paged = cache_of(cache, layout, true, arrays);
  const MathMode mode = parse_math_mode(math);
  const bool has_slots = places.contains("slots");
  TensorView slots;
  KvPositions positions;
  if (has_slots) {
    slots = arrays.input("slots", places["slots"]);
  } else {
    positions = {.batch_indices = arrays.input("batch_indices", places["batch_indices"]),
                 .positions = arrays.input("positions", places["positions"]),
                 .indices = arrays.input("indices", places["indices"]),
                 .indptr = arrays.input("indptr", places["indptr"])};
  }
  const Stream stream = arrays.stream();
  const nb::gil_scoped_release unlocked;
  if (has_slots) {
    kv_append_slots(keys, values, slots, paged, mode, stream);
  } else {
    kv_append_paged(keys, values, positions, paged, mode, stream);
  }
}

// The cache's scales are arrays for the decode scales; encode: k and v, each None, number or array.
void run_kv_quantize_paged_cache(nb::handle key, nb::handle value, const NamedArrays& cache,
                                 std::string_view layout, const NamedArrays& encode,
                                 std::string_view math) {
  Arrays arrays;
  const TensorView keys = arrays.input("key", key);
  const TensorView values = arrays.input("value", value);
  const PagedKvCache paged = cache_of(cache, layout, true, arrays);
  const KvCacheQuantizeOptions options{
      .math = parse_math_mode(math),
      .k_encode_scale = arrays.scale("k_encode_scale", encode["k"]),
      .v_encode_scale = arrays.scale("v_encode_scale", encode["v"])};
  const Stream stream = arrays.stream();
  const nb::gil_scoped_release unlocked;
  kv_quantize_paged_cache(keys, values, paged, options, stream);
}

void run_kv_reorder(nb::handle input, nb::handle output, std::string_view layout, bool is_inverse) {
  Arrays arrays;
  const TensorView from = arrays.input("scales", input);
  const TensorView to = arrays.output("out", output);
  const KvLayout order = parse_layout(layout);
  const Stream stream = arrays.stream();
  const nb::gil_scoped_release unlocked;
  (is_inverse ? kv_restore_v_scales : kv_reorder_v_scales)(from, to, order, stream);
}

}  // namespace

void bind_kv_cache(nb::module_& module) {
  module.def("kv_quantize", &run_kv_quantize, "input"_a, "values"_a, "scales"_a,
             "decode_scale"_a.none(), "math"_a);
  module.def("kv_dequantize", &run_kv_dequantize, "values"_a, "scales"_a, "output"_a,
             "decode_scale"_a.none());
  module.def("kv_dequantize_paged", &run_kv_dequantize_paged);
  module.def("kv_append", &run_kv_append);
  module.def("kv_quantize_paged_cache", &run_kv_quantize_paged_cache);
  module.def("kv_reorder", &run_kv_reorder);
}

}  // namespace narrowfloat::python
