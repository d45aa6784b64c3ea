// Routing, permutation and combine as functions of their own, and the listings of routing methods,
// modes and activations.
#include <string>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "narrowfloat/combine.h"
#include "narrowfloat/moe.h"
#include "narrowfloat/permute.h"
#include "narrowfloat/route.h"
#include "python/src/bindings.h"
#include "python/src/moe_arguments.h"
#include "python/src/streams.h"

namespace narrowfloat::python {
namespace {

using nb::literals::operator""_a;

Stream first_stream(const std::vector<Array>& arrays) {
  return arrays.empty() ? Stream{} : current_stream(arrays.front());
}

void run_route(const NamedArrays& routing_arrays, const PythonMoeConfig& config,
               const NamedArrays& output_arrays, nb::handle errors) {
  static constexpr NamedView<RouteOutputs> kMembers[] = {{"ids", &RouteOutputs::ids},
                                                         {"weights", &RouteOutputs::weights},
                                                         {"replay", &RouteOutputs::replay}};
  std::vector<Array> arrays;
  const Routing routing = routing_of(routing_arrays, arrays);
  RouteOutputs outputs;
  set_views(output_arrays, kMembers, outputs, arrays, true);
  outputs.errors = device_errors(errors, arrays);
  const Stream stream = first_stream(arrays);
  const nb::gil_scoped_release unlocked;
  route(routing, config.config.routing, outputs, stream);
}

void run_permute(nb::handle ids, int32_t expert_offset, int32_t local_experts, int32_t token_tile,
                 const NamedArrays& output_arrays) {
  const Array input = input_array("ids", ids);
  std::vector<Array> arrays;
  Permutation permutation;
  permutation.token_tile = token_tile;
  set_views(output_arrays, kPermutationMembers, permutation, arrays, true);
  const Stream stream = current_stream(input);
  const nb::gil_scoped_release unlocked;
  permute(input.view, expert_offset, local_experts, permutation, stream);
}

void run_combine(nb::handle slot_rows, nb::handle slot_to_row, nb::handle weights, nb::handle out) {
  const Array rows = input_array("slot_rows", slot_rows);
  const Array map = input_array("slot_to_row", slot_to_row);
  const Array factors = input_array("weights", weights);
  const Array target = output_array("out", out);
  const Stream stream = current_stream(rows);
  const nb::gil_scoped_release unlocked;
  combine(rows.view, map.view, factors.view, target.view, stream);
}

template <typename Infos>
NamedTexts listing(const Infos& infos,
                   std::string_view (*text)(const typename Infos::value_type&)) {
  NamedTexts names;
  for (const auto& info : infos) names[std::string(info.name).c_str()] = std::string(text(info));
  return names;
}

}  // namespace

void bind_routing(nb::module_& module) {
  module.def("route", &run_route, "routing"_a, "config"_a, "outputs"_a, "errors"_a.none());
  module.def("permute", &run_permute);
  module.def("combine", &run_combine, "slot_rows"_a, "slot_to_row"_a, "weights"_a.none(), "out"_a);
  module.def("default_token_tile", &default_token_tile, "tokens"_a, "slots"_a, "local_experts"_a,
             "The tile that is used where none is asked for.");
  module.def(
      "permutation_sizes",
      [](int64_t tokens, int64_t slots, int32_t local_experts, int32_t token_tile) {
        const auto sizes = permutation_layout(tokens, slots, local_experts, token_tile);
        return std::pair(sizes.max_tiles, sizes.max_rows);
      },
      "tokens"_a, "slots"_a, "local_experts"_a, "token_tile"_a,
      "(tiles, rows): bounds over all routings.");
  module.def(
      "routing_methods",
      [] {
        return listing(
            all_routing_methods(), +[](const RoutingMethodInfo& info) { return info.description; });
      },
      "All routing methods: name -> description.");
  module.def(
      "moe_modes",
      [] {
        return listing(
            all_moe_modes(), +[](const MoeModeInfo& info) { return info.description; });
      },
      "All modes of a Mixture-of-Experts layer: name -> description.");
  module.def(
      "activations",
      [] {
        return listing(
            all_activations(), +[](const ActivationInfo& info) { return info.formula; });
      },
      "All activations: name -> formula, in the halves u (up) and g (gate).");
}

}  // namespace narrowfloat::python
