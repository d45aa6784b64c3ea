// Names of expert weights in checkpoints, and the tensors of one layer's experts.
//
//   X.layers.L.mlp.experts.E.{gate_proj,up_proj,down_proj}.weight      Qwen, DeepSeek, GLM, OLMoE
//   X.layers.L.feed_forward.experts.E.{gate_proj, ...}.weight          Llama-4
//   X.layers.L.block_sparse_moe.experts.E.{w1,w3,w2}.weight            Mixtral, MiniMax
//   layers.L.ffn.experts.E.{w1,w3,w2}.weight                           DeepSeek's own files
// Stacked experts:
//   X.layers.L.{mlp,feed_forward}.experts.{gate_up_proj,down_proj}     gpt-oss, Llama-4
//   block.L.mlp.{mlp1_weight,mlp2_weight}                              gpt-oss' original files
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "narrowfloat/checkpoint.h"

namespace narrowfloat {

enum class ExpertMatrix : int { kGate = 0, kUp = 1, kDown = 2 };
std::string_view name(ExpertMatrix matrix);

struct ExpertName {
  std::string_view block;  // "model.layers.3.mlp": the prefix of the router's name.
  int64_t layer = 0;
  int64_t expert = 0;
  ExpertMatrix matrix = ExpertMatrix::kGate;
};
// Empty for other tensors. The view is into `tensor`.
std::optional<ExpertName> parse_expert_name(std::string_view tensor);

// One matrix of all experts of a layer.
struct StackedName {
  std::string_view block;
  int64_t layer = 0;
  bool is_down = false;  // Else gate and up.
  // The unquantized weight is [E, K, N]; else [E, N, K].
  bool is_transposed = false;
};
// Empty for other tensors. The view is into `tensor`.
std::optional<StackedName> parse_stacked_name(std::string_view tensor);

// "model.layers.3.mlp.experts.down_proj_bias", "block.3.mlp.mlp2_bias": the bias of a stacked
// weight.
std::string stacked_bias_name(std::string_view weight);

// Weights of the experts of one layer: one by one, indexed [expert][ExpertMatrix], or stacked: the
// first matrix (gate and up) and the second.
struct LayerExperts {
  std::string block;
  std::vector<std::array<const LogicalTensor*, 3>> experts;
  std::array<const LogicalTensor*, 2> stacked{};

  [[nodiscard]] bool is_stacked() const { return stacked[0] != nullptr; }
};
// Layers with experts, ascending.
std::set<int64_t> layers_with_experts(std::span<const LogicalTensor> tensors);

// Pointers into `tensors`. Throws kInvalidArgument for a layer without experts, kCorruptData where
// the experts 0 .. max do not all have all three matrices, or a layer has half of them stacked.
LayerExperts layer_experts(std::span<const LogicalTensor> tensors, int64_t layer,
                           const std::string& path);

}  // namespace narrowfloat
