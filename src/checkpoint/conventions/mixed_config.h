// Configs of models whose weights have several formats: compressed-tensors' `mixed-precision`, with
// a format for each of its groups, and ModelOpt's `MIXED_PRECISION`, with one for each layer. Both
// are read as several configs of one format; the tensors say which weight has which.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "checkpoint/conventions/convention.h"

namespace narrowfloat {

// The config itself, if it is about one format.
std::vector<nlohmann::json> split_by_format(const nlohmann::json& config);

// The modules of one convention in a model of several, all with activation scales or all without.
struct FormatGroup {
  const ConventionSpec* spec = nullptr;
  bool has_input_scales = false;
  std::vector<std::string> modules = {};
};

// Value of `quantization_config` of a model with several groups, of conventions that go together.
// All modules are named: in compressed-tensors by regular expressions where all modules that differ
// in numbers only are in one group.
nlohmann::ordered_json mixed_quantization_config(std::span<const FormatGroup> groups,
                                                 const QuantizedModel& model);
// ModelOpt's own file; empty for compressed-tensors.
std::vector<ConfigFile> mixed_extra_configs(std::span<const FormatGroup> groups,
                                            const QuantizedModel& model);

}  // namespace narrowfloat
