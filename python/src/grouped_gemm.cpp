// The grouped GEMM: packed weights as an object, and the products of rows with them.
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string_view.h>

#include "narrowfloat/gemm.h"
#include "python/src/bindings.h"
#include "python/src/moe_arguments.h"
#include "python/src/streams.h"

namespace narrowfloat::python {
namespace {

using nb::literals::operator""_a;

GroupedWeights prepare(std::string_view mode, nb::handle values, nb::handle scales,
                       std::string_view layout) {
  std::vector<Array> arrays;
  arrays.reserve(2);
  const MoeMode parsed = parse_moe_mode(mode);
  const WeightView view = weight_view("w", parsed, values, scales, layout, arrays);
  const Stream stream = current_stream(arrays.front());
  const nb::gil_scoped_release unlocked;
  return GroupedWeights::prepare(view, parsed, view.values.device, stream);
}

// output[p] = scale * row_scale * (w * row) + bias for each row p of the permutation's tiles. Row p
// reads row row_to_token[p] of the values, or row p of them where the permutation has none.
void run(const GroupedWeights& weights, nb::handle values, nb::handle scales, nb::handle row_scale,
         int32_t token_tile, const NamedArrays& permutation, nb::handle scale, nb::handle bias,
         nb::handle output, nb::handle workspace) {
  std::vector<Array> arrays;
  arrays.reserve(16);
  const Array input = input_array("a", values, type_of_bytes(weights.mode()));
  GroupedGemmArgs args;
  args.a.values = input.view;
  args.a.scales = arrays.emplace_back(input_array("a_scales", scales, DType::kU8)).view;
  args.a.row_scale = arrays.emplace_back(input_array("row_scale", row_scale)).view;
  args.permutation.token_tile = token_tile;
  set_views(permutation, kPermutationMembers, args.permutation, arrays, false);
  args.gather_tokens = !args.permutation.row_to_token.is_absent();
  args.scale = per_expert("scale", scale, arrays);
  args.bias = arrays.emplace_back(input_array("bias", bias)).view;
  args.output = arrays.emplace_back(output_array("output", output)).view;
  const Array space = output_array("workspace", workspace, DType::kU8);
  const Stream stream = current_stream(input);
  const nb::gil_scoped_release unlocked;
  grouped_gemm(args, weights, space.view, stream);
}

}  // namespace

void bind_grouped_gemm(nb::module_& module) {
  nb::class_<GroupedWeights>(module, "GroupedWeights")
      .def_static("prepare", &prepare, "mode"_a, "values"_a, "scales"_a.none(), "layout"_a)
      .def_prop_ro("rows", &GroupedWeights::rows)
      .def_prop_ro("cols", &GroupedWeights::cols)
      .def_prop_ro("experts", &GroupedWeights::experts)
      .def_prop_ro("bytes", &GroupedWeights::bytes)
      .def(
          "workspace",
          [](const GroupedWeights& self, int64_t rows) {
            return grouped_gemm_workspace(self, rows, Accumulation::kFp32);
          },
          "rows"_a, "Bytes of workspace for so many rows.")
      .def("run", &run, "values"_a, "scales"_a.none(), "row_scale"_a.none(), "token_tile"_a,
           "permutation"_a, "scale"_a, "bias"_a.none(), "output"_a, "workspace"_a);
}

}  // namespace narrowfloat::python
