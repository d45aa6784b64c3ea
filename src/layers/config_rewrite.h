// The config.json of a checkpoint that was quantized, dequantized or converted: that of the source
// with another declaration.
#pragma once

#include <string>

#include "checkpoint/conventions/convention.h"

namespace narrowfloat {

// Removes every declaration: also one level down, in the config of a nested model, and
// DeepSeek-V4's declaration of its experts.
std::string without_declaration(const std::string& config_text);
// Puts this one in the place of all others.
std::string with_declaration(const std::string& config_text,
                             const nlohmann::ordered_json& quantization_config);

// A head that is tied to the embedding has no tensor, but loaders build a Linear module for it and
// would look for its codes. Adds it to the modules that are not quantized, and sorts these.
void ignore_untied_head(const Checkpoint& source, QuantizedModel& model);

}  // namespace narrowfloat
