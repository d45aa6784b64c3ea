// The modules of a target by the convention that each is stored in, and the configs that say so.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/conventions/mixed_config.h"
#include "layers/rewrite.h"

namespace narrowfloat {

class FormatGroups {
 public:
  // Adds the quantized module of a weight. `has_input_scale`: its activations are quantized by a
  // stored scale.
  void add(const ConventionSpec& spec, bool has_input_scale, std::string_view module);

  // Whether there are several conventions.
  [[nodiscard]] bool is_mixed() const;
  // "mxfp8-ct,nvfp4-ct": the value of kConventionKey.
  [[nodiscard]] std::string names() const;
  // Sets the configs of a target whose source is a directory. `model` is about all modules.
  void set_configs(const QuantizedModel& model, RewriteJob& job) const;
  // Warnings of conventions whose loaders would miss activation scales.
  [[nodiscard]] std::vector<std::string> warnings() const;

 private:
  std::vector<FormatGroup> groups_;
};

}  // namespace narrowfloat
