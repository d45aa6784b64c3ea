// How one stored tensor and its companions fit one convention: by names, dtypes and shapes.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "checkpoint/conventions/convention.h"

namespace narrowfloat {

// A suffix that says little: modules of other kinds have parameters of this name.
inline constexpr std::string_view kGenericScale = "scale";

// `problem` is empty, or says what is wrong.
struct Fit {
  const ConventionSpec* spec = nullptr;
  LogicalTensor weight = {};
  std::string problem = {};
  // A tensor is there whose name only a companion has; not just any `X.scale`.
  bool has_companion = false;

  [[nodiscard]] bool ok() const { return problem.empty(); }
};

// Of the weight whose codes `values` would be. Empty if it cannot be codes of this convention.
std::optional<Fit> fit_weight(const Checkpoint& checkpoint, const ConventionSpec& spec,
                              const TensorInfo& values);

// What is before a suffix: "model.up_proj." for "model.up_proj.weight_packed" and "weight_packed",
// which is a whole component; "experts.down_proj" for "experts.down_proj_blocks" and "_blocks".
// Empty if the name ends otherwise.
std::optional<std::string> stem_of(std::string_view tensor, std::string_view suffix);

// "'NAME' U8 [8, 32]" and "[8, 32]": for messages.
std::string tensor_text(const TensorInfo& info);
std::string shape_text(std::span<const int64_t> shape);

}  // namespace narrowfloat
