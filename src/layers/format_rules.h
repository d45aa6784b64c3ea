// The rules of a quantization: which weight gets which format, with which settings.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "layers/quantized_weight.h"
#include "narrowfloat/checkpoint.h"

namespace narrowfloat {

struct WeightChoice {
  const ConventionSpec* spec = nullptr;  // nullptr: the weight is kept.
  EncodeSettings settings = {};

  [[nodiscard]] std::optional<FormatId> format() const {
    if (spec == nullptr) return std::nullopt;
    return spec->info.format;
  }
};

// One entry for each tensor: of the first rule that matches, else `base` with `settings`. Settings
// that a format has no use for are left out, unless its own rule has them. Throws kInvalidArgument
// for a format that cannot be in one checkpoint with `base`, a setting of a rule that its format
// has no use for, and a glob that matches nothing.
std::vector<WeightChoice> choose_formats(std::span<const LogicalTensor> tensors,
                                         const ConventionSpec& base, const EncodeSettings& settings,
                                         std::span<const QuantizeRule> rules);

// Writes " GLOB=FORMAT[,SETTING...]" for each rule, as the metadata has it.
std::string rules_text(std::span<const QuantizeRule> rules);

}  // namespace narrowfloat
