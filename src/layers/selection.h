// Which tensors of an unquantized checkpoint are quantized, and which of them share a global scale.
//
// The default is all 2-D `*.weight` tensors of linear layers, experts included, whose K fits the
// format, without embeddings, norms, routers, output heads, convolutions (GPT-2's Conv1D too),
// rotary tables, and what the source config excludes. Includes add to that; excludes win over both.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "narrowfloat/checkpoint.h"

namespace narrowfloat {

struct SelectionRules {
  FormatId format = FormatId::kNvfp4;
  std::vector<std::string> include;  // Globs over tensor names.
  std::vector<std::string> exclude;
  // Globs over module names, from the source config; they include the modules below a match.
  std::vector<std::string> excluded_modules;
  // One format for each tensor, in place of `format`; none keeps it as it is. Empty: no rules.
  std::vector<std::optional<FormatId>> formats = {};
};

struct Selection {
  bool quantize = false;
  std::string reason;  // The reason if it is not quantized.
  // The tensor is the weight of a linear module: configs must list it if it is not quantized.
  bool is_linear = false;
  bool is_head_or_router = false;  // Loaders leave these alone without being told.
  std::string warning;             // Empty, or an unusual property of the choice.
};

// Returns one entry per tensor. Throws kInvalidArgument for an included tensor that cannot be
// quantized and for a glob that matches no tensor.
std::vector<Selection> select_tensors(std::span<const LogicalTensor> tensors,
                                      const SelectionRules& rules);

// Warnings for exclusions of the source config that match no tensor. `path`: the checkpoint, for
// messages.
std::vector<std::string> unmatched_exclusions(std::span<const LogicalTensor> tensors,
                                              const std::vector<std::string>& excluded_modules,
                                              const std::string& path);

// The entries of configs that exclude modules. Plain names, of which there may be as many as
// modules, are looked up; patterns are tried one by one. Keeps references to the entries.
class ModuleExclusions {
 public:
  explicit ModuleExclusions(const std::vector<std::string>& entries);

  // Whether an entry names `module` or a module that contains it.
  [[nodiscard]] bool contains(std::string_view module) const;

 private:
  std::unordered_set<std::string_view> names_;
  std::vector<std::string_view> patterns_;
};

// Throws kInvalidArgument, which names the option, for a glob that matches no tensor.
void refuse_unmatched(const char* option, const std::vector<std::string>& globs,
                      std::span<const LogicalTensor> tensors);

// Modules that the config of the checkpoint at `path` excludes: config_text is JSON or empty.
// Throws kUnsupported for regular expressions, kCorruptData for too many patterns.
std::vector<std::string> excluded_modules_of(const std::string& config_text,
                                             const std::string& path);

// Whether a tensor is the weight of a linear module, as configs count them.
bool is_linear_weight(const LogicalTensor& tensor);

// "model.layers.0.mlp.up_proj" for its weight; empty if the name does not end in ".weight".
std::string_view module_of(std::string_view tensor);

// Weights with the same nonempty key are merged by consumers into one matrix (q, k, v; gate and
// up), so they share one NVFP4 global scale. Empty: the weight has its own.
std::string shared_scale_key(std::string_view tensor);

}  // namespace narrowfloat
