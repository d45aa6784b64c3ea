// The state of a prepared layer: packed weights, and copies of everything small that the caller
// gave, all on the layer's device. It is immutable and never copied, because the configuration's
// per-expert values are views into it.
#pragma once

#include <optional>

#include "layers/moe/owned_tensor.h"
#include "layers/moe/plan.h"
#include "narrowfloat/moe.h"

namespace narrowfloat {

struct PreparedMoe {
  PreparedMoe(const MoeWeights& weights, const MoeConfig& source,
              const MoeReferenceOptions& reference, Device where, Stream stream);
  PreparedMoe(const PreparedMoe&) = delete;
  PreparedMoe& operator=(const PreparedMoe&) = delete;
  ~PreparedMoe() = default;

  [[nodiscard]] int32_t token_tile(int64_t tokens) const;  // The configuration's, or the rule's.
  // A plan without stages. Throws for numbers of tokens that a stage refuses in tiles of this size.
  [[nodiscard]] MoePlan plan(int64_t tokens, int32_t token_tile) const;

  Device device;
  MoeExtents extents;
  OwnedPerExpert alpha, beta, limit_gate, limit_up;
  MoeConfig config;
  OwnedPerExpert up_scale, gate_scale, down_scale, inter_multiplier;
  std::optional<OwnedPerExpert> input_multiplier;
  OwnedTensor bias1, bias2;
  GroupedWeights w1, w2;

 private:
  void check_stages(const PermutationLayout& permutation, const MoeExtents& of_call) const;
};

}  // namespace narrowfloat
