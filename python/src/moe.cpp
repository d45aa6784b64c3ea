// The Mixture-of-Experts layer: its configuration and weights as objects that are filled from
// Python, and the layer itself.
#include "narrowfloat/moe.h"

#include <optional>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "narrowfloat/error.h"
#include "narrowfloat/moe_tuning.h"
#include "narrowfloat/runtime.h"
#include "python/src/bindings.h"
#include "python/src/choices.h"
#include "python/src/moe_arguments.h"
#include "python/src/streams.h"
#include "python/src/words.h"

namespace narrowfloat::python {
namespace {

using nb::literals::operator""_a;
using Config = PythonMoeConfig;
using Weights = PythonMoeWeights;

// The parameters that are not at their defaults, as numbers, which is how checkpoints store them.
nb::typed<nb::dict, nb::str, float> activation_parameters(const Config& self) {
  const Activation& activation = self.config.activation;
  const Activation defaults;
  nb::typed<nb::dict, nb::str, float> parameters;
  const auto add = [&](const char* name, PerExpert Activation::*member) {
    const float value = (activation.*member).value;
    if (value != (defaults.*member).value) parameters[name] = value;
  };
  add("alpha", &Activation::alpha);
  add("beta", &Activation::beta);
  add("limit_gate", &Activation::limit_gate);
  add("limit_up", &Activation::limit_up);
  return parameters;
}

void set_activation(Config& self, std::string_view kind, const NamedArrays& parameters) {
  Activation activation;
  activation.kind = parse_activation(kind);
  for (const auto& [key, value] : parameters) {
    const auto name = nb::cast<std::string>(key);
    const auto member =
        parse_choice<PerExpert Activation::*>("activation", name,
                                              {{"alpha", &Activation::alpha},
                                               {"beta", &Activation::beta},
                                               {"limit_gate", &Activation::limit_gate},
                                               {"limit_up", &Activation::limit_up}});
    activation.*member = per_expert(name, value, self.arrays);
  }
  self.config.activation = activation;
}

// Binds a field of MoeConfig, or of the routing in it, that Python sees unchanged.
template <typename T>
void bind_field(nb::class_<Config>& type, const char* name, T MoeConfig::*field) {
  type.def_prop_rw(
      name, [field](const Config& self) { return self.config.*field; },
      [field](Config& self, T value) { self.config.*field = value; });
}

template <typename T>
void bind_field(nb::class_<Config>& type, const char* name, T RoutingConfig::*field) {
  type.def_prop_rw(
      name, [field](const Config& self) { return self.config.routing.*field; },
      [field](Config& self, T value) { self.config.routing.*field = value; });
}

void bind_field(nb::class_<Config>& type, const char* name, bool MoeReferenceOptions::*field) {
  type.def_prop_rw(
      name, [field](const Config& self) { return self.reference.*field; },
      [field](Config& self, bool value) { self.reference.*field = value; });
}

void bind_field(nb::class_<Config>& type, const char* name, bool RouterOptions::*field) {
  type.def_prop_rw(
      name, [field](const Config& self) { return self.config.routing.options.*field; },
      [field](Config& self, bool value) { self.config.routing.options.*field = value; });
}

void bind_float_type(nb::class_<Config>& type, const char* name, DType MoeConfig::*field) {
  type.def_prop_rw(
      name,
      [field](const Config& self) { return std::string(float_type_name(self.config.*field)); },
      [field, name](Config& self, std::string_view text) {
        self.config.*field = parse_float_type(name, text);
      });
}

void bind_words(nb::class_<Config>& type) {
  type.def_prop_rw(
          "mode", [](const Config& self) { return std::string(name(self.config.mode)); },
          [](Config& self, std::string_view text) { self.config.mode = parse_moe_mode(text); })
      .def_prop_rw(
          "gate_order",
          [](const Config& self) { return std::string(name(self.config.gate_order)); },
          [](Config& self, std::string_view text) {
            self.config.gate_order = parse_gate_order(text);
          })
      .def_prop_rw(
          "method",
          [](const Config& self) { return std::string(name(self.config.routing.method)); },
          [](Config& self, std::string_view text) {
            self.config.routing.method = parse_routing_method(text);
          })
      .def_prop_rw(
          "accumulation",
          [](const Config& self) {
            return self.reference.accumulation == Accumulation::kFp64 ? "float64" : "float32";
          },
          [](Config& self, std::string_view text) {
            self.reference.accumulation = parse_choice<Accumulation>(
                "accumulation", text,
                {{"float32", Accumulation::kFp32}, {"float64", Accumulation::kFp64}});
          })
      .def_prop_ro(
          "activation",
          [](const Config& self) { return std::string(name(self.config.activation.kind)); })
      .def_prop_ro(
          "is_gated",
          [](const Config& self) { return activation_info(self.config.activation.kind).is_gated; })
      .def_prop_ro("activation_parameters", &activation_parameters)
      .def("set_activation", &set_activation, "kind"_a, "parameters"_a);
}

void bind_config(nb::module_& module) {
  nb::class_<Config> type(module, "MoeConfig");
  type.def(nb::init<>());
  bind_field(type, "hidden", &MoeConfig::hidden);
  bind_field(type, "inter", &MoeConfig::inter);
  bind_field(type, "expert_offset", &MoeConfig::expert_offset);
  bind_field(type, "local_experts", &MoeConfig::local_experts);
  bind_field(type, "weight_on_input", &MoeConfig::weight_on_input);
  bind_field(type, "add_fc2_bias", &MoeConfig::add_fc2_bias);
  bind_field(type, "fast_sums", &MoeConfig::fast_sums);
  bind_field(type, "token_tile", &MoeConfig::token_tile);
  bind_field(type, "fp32_rows", &MoeReferenceOptions::fp32_rows);
  bind_field(type, "double_quantize_fc1", &MoeReferenceOptions::double_quantize_fc1);
  bind_field(type, "experts", &RoutingConfig::experts);
  bind_field(type, "top_k", &RoutingConfig::top_k);
  bind_field(type, "shared_experts", &RoutingConfig::shared_experts);
  bind_field(type, "n_group", &RoutingConfig::n_group);
  bind_field(type, "topk_group", &RoutingConfig::topk_group);
  bind_field(type, "routed_scale", &RoutingConfig::routed_scale);
  bind_field(type, "norm_topk", &RoutingConfig::norm_topk);
  bind_field(type, "weights_bf16", &RouterOptions::weights_bf16);
  bind_field(type, "grouped_bias_bf16", &RouterOptions::grouped_bias_bf16);
  bind_field(type, "negative_one_is_empty", &RouterOptions::negative_one_is_empty);
  bind_float_type(type, "out_dtype", &MoeConfig::out_dtype);
  bind_float_type(type, "slot_dtype", &MoeConfig::slot_dtype);
  bind_words(type);
}

void set_weight(Weights& self, std::string_view which, nb::handle values, nb::handle scales,
                std::string_view layout) {
  WeightView& target = which == "w1" ? self.weights.w1 : self.weights.w2;
  target = weight_view(which, self.mode, values, scales, layout, self.arrays);
}

void set_factor(Weights& self, std::string_view which, nb::handle value) {
  const PerExpert factor = per_expert(which, value, self.arrays);
  if (which == "input_multiplier") {
    self.weights.input_multiplier = factor;
    return;
  }
  self.weights.*parse_choice<PerExpert MoeWeights::*>(
                    "factor", which,
                    {{"up_scale", &MoeWeights::up_scale},
                     {"gate_scale", &MoeWeights::gate_scale},
                     {"down_scale", &MoeWeights::down_scale},
                     {"inter_multiplier", &MoeWeights::inter_multiplier}}) = factor;
}

void set_bias(Weights& self, std::string_view which, nb::handle value) {
  TensorView& target = which == "bias1" ? self.weights.bias1 : self.weights.bias2;
  target = self.arrays.emplace_back(input_array(which, value)).view;
}

void bind_weights(nb::module_& module) {
  nb::class_<Weights>(module, "MoeWeights")
      .def("__init__",
           [](Weights* self, std::string_view mode) {
             new (self) Weights{.mode = parse_moe_mode(mode), .weights = {}, .arrays = {}};
           })
      .def("set_weight", &set_weight, "which"_a, "values"_a, "scales"_a.none(), "layout"_a)
      .def("set_factor", &set_factor)
      .def("set_bias", &set_bias);
}

MoeLayer prepare(const Weights& weights, const Config& config) {
  if (weights.arrays.empty()) throw Error(ErrorKind::kInvalidArgument, "w1: missing");
  const Array& first = weights.arrays.front();
  const Device device = first.view.device;
  const Stream stream = current_stream(first);
  const nb::gil_scoped_release unlocked;
  if (config.is_reference(device)) {
    return MoeLayer::prepare_reference(weights.weights, config.config, config.reference);
  }
  return MoeLayer::prepare(weights.weights, config.config, device, stream);
}

constexpr NamedView<MoeOutputs> kOutputs[] = {{"out", &MoeOutputs::out},
                                              {"slot_out", &MoeOutputs::slot_out},
                                              {"expert_weights", &MoeOutputs::expert_weights},
                                              {"slot_to_row", &MoeOutputs::slot_to_row},
                                              {"topk_ids", &MoeOutputs::topk_ids},
                                              {"routing_replay", &MoeOutputs::routing_replay}};

void run(const MoeLayer& layer, nb::handle values, nb::handle scales, nb::handle row_scale,
         const NamedArrays& routing_arrays, const NamedArrays& output_arrays, nb::handle errors,
         nb::handle workspace) {
  std::vector<Array> arrays;
  arrays.reserve(16);
  const Array input = input_array("hidden", values, type_of_bytes(layer.config().mode));
  MoeInputs inputs{.values = input.view, .scales = {}, .row_scale = {}};
  inputs.scales = arrays.emplace_back(input_array("hidden_scales", scales, DType::kU8)).view;
  inputs.row_scale = arrays.emplace_back(input_array("row_scale", row_scale)).view;
  const Routing routing = routing_of(routing_arrays, arrays);
  MoeOutputs outputs;
  set_views(output_arrays, kOutputs, outputs, arrays, true);
  outputs.errors = device_errors(errors, arrays);
  const Array space = output_array("workspace", workspace, DType::kU8);
  const Stream stream = current_stream(input);
  const nb::gil_scoped_release unlocked;
  layer.run(inputs, routing, outputs, space.view, stream);
}

}  // namespace

bool PythonMoeConfig::is_reference(Device device) const {
  const char* option = nullptr;
  if (reference.accumulation != Accumulation::kFp32) option = "accumulation";
  if (reference.fp32_rows) option = "fp32_rows";
  if (reference.double_quantize_fc1) option = "double_quantize_fc1";
  if (option == nullptr || device.type == DeviceType::kCpu) return option != nullptr;
  throw Error(ErrorKind::kUnsupported, std::string(option) +
                                           ": for layers on the CPU alone, not on " +
                                           to_string(device) + "; leave it at its default");
}

void bind_moe(nb::module_& module) {
  bind_config(module);
  bind_weights(module);
  nb::class_<MoeLayer>(module, "MoeLayer")
      .def_static("prepare", &prepare, "weights"_a, "config"_a)
      .def_prop_ro("weight_bytes", &MoeLayer::weight_bytes)
      .def(
          "with_tuning",
          [](const MoeLayer& self, const std::string& path) {
            return self.with_tuning(MoeTuning::load(path));
          },
          "path"_a)
      .def(
          "with_tuning_text",
          [](const MoeLayer& self, std::string_view json) {
            return self.with_tuning(MoeTuning::parse(json));
          },
          "json"_a)
      .def("required_workspace", &MoeLayer::required_workspace, "tokens"_a)
      .def("token_tile", &MoeLayer::token_tile, "tokens"_a)
      .def("max_rows", &MoeLayer::max_rows, "tokens"_a)
      .def("run", &run, "values"_a, "scales"_a.none(), "row_scale"_a.none(), "routing"_a,
           "outputs"_a, "errors"_a.none(), "workspace"_a);
}

}  // namespace narrowfloat::python
