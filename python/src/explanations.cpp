// Which implementation an operation would use, and why not the others.
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "narrowfloat/error.h"
#include "narrowfloat/moe.h"
#include "narrowfloat/moe_tuning.h"
#include "narrowfloat/runtime.h"
#include "python/src/bindings.h"
#include "python/src/choices.h"
#include "python/src/moe_arguments.h"
#include "python/src/words.h"

namespace narrowfloat::python {
namespace {

using nb::literals::operator""_a;

struct ExplainArguments {
  std::string format, math, dtype, device;
  std::optional<std::string> layout;
  int64_t batch, rows, cols;
};

ExplainRequest to_request(const ExplainArguments& from) {
  ExplainRequest request{.format = parse_format(from.format),
                         .scale_layout = {},
                         .math = parse_math_mode(from.math),
                         .dtype = DType::kBF16,
                         .batch = from.batch,
                         .rows = from.rows,
                         .cols = from.cols,
                         .device = parse_device(from.device)};
  if (from.layout) request.scale_layout = parse_scale_layout(*from.layout);
  request.dtype = parse_choice<DType>("dtype", from.dtype,
                                      {{"bfloat16", DType::kBF16},
                                       {"float16", DType::kF16},
                                       {"float32", DType::kF32},
                                       {"float8_e4m3fn", DType::kF8E4M3}});
  return request;
}

// The key with the member names of an entry in a file.
NamedValues to_dictionary(const MoeTuningKey& key) {
  NamedValues result;
  result["machine"] = key.machine;
  result["version"] = key.version;
  result["mode"] = std::string(name(key.mode));
  result["activation"] = std::string(name(key.activation));
  result["hidden"] = key.hidden;
  result["inter"] = key.inter;
  result["slots"] = key.slots;
  result["experts"] = key.experts;
  result["local_experts"] = key.local_experts;
  return result;
}

}  // namespace

void bind_explanations(nb::module_& module) {
  nb::class_<Candidate>(module, "Candidate", "An implementation and whether it takes a problem.")
      .def_ro("name", &Candidate::name)
      .def_ro("supported", &Candidate::supported)
      .def_ro("reason", &Candidate::reason, "Why not, or why it was passed over.");
  nb::class_<Explanation>(module, "Explanation", "Which implementation an operation would use.")
      .def_ro("op", &Explanation::op)
      .def_ro("problem", &Explanation::problem, "The problem in words.")
      .def_ro("candidates", &Explanation::candidates, "In the order they are asked.")
      .def_ro("chosen", &Explanation::chosen, "Empty if none fits.")
      .def("__repr__", [](const Explanation& self) {
        return "Explanation(" + self.op + ": " + (self.chosen.empty() ? "none" : self.chosen) + ")";
      });
  module.def("operations", &operations, "Names of the operations that explain() knows.");
  module.def(
      "explain",
      [](std::string_view op, const std::tuple<int64_t, int64_t, int64_t>& shape,
         std::string format, std::optional<std::string> layout, std::string dtype, std::string math,
         std::string device) {
        const auto [batch, rows, cols] = shape;
        return explain(op, to_request({.format = std::move(format),
                                       .math = std::move(math),
                                       .dtype = std::move(dtype),
                                       .device = std::move(device),
                                       .layout = std::move(layout),
                                       .batch = batch,
                                       .rows = rows,
                                       .cols = cols}));
      },
      "op"_a, "shape"_a, "format"_a, "layout"_a.none(), "dtype"_a, "math"_a, "device"_a);
  module.def(
      "explain_moe",
      [](const PythonMoeConfig& config, int64_t tokens, const std::string& name) {
        const Device device = parse_device(name);
        return config.is_reference(device)
                   ? explain_moe_reference(config.config, config.reference, tokens)
                   : explain_moe(config.config, tokens, device);
      },
      "config"_a, "tokens"_a, "device"_a);
  module.def(
      "moe_tuning_key",
      [](const PythonMoeConfig& config, const std::string& device) {
        return to_dictionary(moe_tuning_key(config.config, parse_device(device)));
      },
      "config"_a, "device"_a);
  // The text of a file of token tiles as the library writes it. Throws where load() would refuse
  // it.
  module.def(
      "normalized_tuning", [](std::string_view json) { return MoeTuning::parse(json).to_json(); },
      "json"_a);
  module.def(
      "load_tuning", [](const std::string& path) { return MoeTuning::load(path).to_json(); },
      "path"_a);
}

}  // namespace narrowfloat::python
