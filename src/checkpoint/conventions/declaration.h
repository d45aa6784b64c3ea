// The quantization that a checkpoint declares in config.json (also in nested model configs),
// hf_quant_config.json, and the __metadata__ that our writer adds to every file.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/conventions/convention.h"

namespace narrowfloat {

// Key in __metadata__ whose value is the name of a convention, or several with commas. A single
// file without config.json keeps its declaration in it.
inline constexpr const char* kConventionKey = "narrowfloat.convention";

struct Declaration {
  std::string source;  // "config.json": for messages.
  std::string method;  // As spelled there: "compressed-tensors, format nvfp4-pack-quantized".
  // Models of mixed precision have several: each weight is stored in one of them.
  std::vector<const ConventionSpec*> specs = {};

  [[nodiscard]] bool has(const ConventionSpec* wanted) const {
    return std::find(specs.begin(), specs.end(), wanted) != specs.end();
  }
  void add(const ConventionSpec* spec) {
    if (!has(spec)) specs.push_back(spec);
  }
  // "nvfp4-ct and mxfp8-ct": for messages.
  [[nodiscard]] std::string names() const;
};

// The declarations in the text of config.json, which is JSON or empty. `path`: the checkpoint, for
// messages. Throws kUnsupported for a method that is not readable, kCorruptData for a declaration
// that contradicts itself.
std::vector<Declaration> declarations_in_config(const std::string& config_text,
                                                const std::string& path);

// Empty if nothing is declared. Throws kUnsupported for a method that is not readable, kCorruptData
// if two declarations contradict each other.
std::optional<Declaration> find_declaration(const Checkpoint& checkpoint);

}  // namespace narrowfloat
