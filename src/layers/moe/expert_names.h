// Names of expert weights in checkpoints, and the tensors of one layer's experts.
//
//   X.layers.L.mlp.experts.E.{gate_proj,up_proj,down_proj}.weight      Qwen, DeepSeek, GLM, OLMoE
//   X.layers.L.block_sparse_moe.experts.E.{w1,w3,w2}.weight            Mixtral
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "narrowfloat/checkpoint.h"

namespace narrowfloat {

enum class ExpertMatrix : int { kGate = 0, kUp = 1, kDown = 2 };
std::string_view name(ExpertMatrix matrix);

struct ExpertName {
  std::string_view block;  // "model.layers.3.mlp": what the router's name starts with.
  int64_t layer = 0;
  int64_t expert = 0;
  ExpertMatrix matrix = ExpertMatrix::kGate;
};
// Empty for other tensors. The view is into `tensor`.
std::optional<ExpertName> parse_expert_name(std::string_view tensor);

// Weights of the experts of one layer, indexed [expert][ExpertMatrix].
struct LayerExperts {
  std::string block;
  std::vector<std::array<const LogicalTensor*, 3>> experts;
};
// Pointers into `tensors`. Throws kInvalidArgument for a layer without experts, kCorruptData where
// the experts 0 .. max do not all have all three matrices.
LayerExperts layer_experts(std::span<const LogicalTensor> tensors, int64_t layer,
                           const std::string& path);

}  // namespace narrowfloat
