// Whether one stored tensor and its companions fit one convention, by names, dtypes and shapes.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "checkpoint/conventions/convention.h"

namespace narrowfloat {

// An ambiguous suffix: modules of other kinds have parameters of this name.
inline constexpr std::string_view kGenericScale = "scale";

// `problem` is empty, or says what is wrong.
struct Fit {
  const ConventionSpec* spec = nullptr;
  LogicalTensor weight = {};
  std::string problem = {};
  // True if a tensor exists whose name only a companion has; `X.scale` alone does not count.
  bool has_companion = false;

  [[nodiscard]] bool ok() const { return problem.empty(); }
};

// Fits the weight whose codes `values` would be. Empty if it cannot be codes of this convention.
std::optional<Fit> fit_weight(const Checkpoint& checkpoint, const ConventionSpec& spec,
                              const TensorInfo& values);

// The part of a name before a suffix: "model.up_proj." for "model.up_proj.weight_packed" and
// "weight_packed", which is a whole component; "experts.down_proj" for "experts.down_proj_blocks"
// and "_blocks". Empty if the name ends otherwise.
std::optional<std::string> stem_of(std::string_view tensor, std::string_view suffix);

// "'NAME' U8 [8, 32]" and "[8, 32]": for messages.
std::string tensor_text(const TensorInfo& info);
std::string shape_text(std::span<const int64_t> shape);

}  // namespace narrowfloat
