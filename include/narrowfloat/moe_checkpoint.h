// One Mixture-of-Experts layer of a checkpoint directory, ready for MoeLayer::prepare.
//
// Reads the names that Hugging Face models use (`model.layers.L.mlp.experts.E.gate_proj.weight`,
// Mixtral's `block_sparse_moe.experts.E.w1.weight`, the stacked experts of gpt-oss and Llama-4,
// ...) in bf16, fp16 or fp32, or in any quantized convention of checkpoint.h, their biases where
// they have some, and the routing from config.json. Nothing but the shard is read, and the router.
// Shared experts stay with the caller: models keep them as a dense layer beside the routed experts.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "narrowfloat/checkpoint.h"
#include "narrowfloat/export.h"
#include "narrowfloat/moe.h"

namespace narrowfloat {

// Tensor parallelism: the columns [offset, offset + count) of a layer's intermediate on one rank.
struct TensorShard {
  int64_t offset = 0;
  int64_t count = 0;
};
// Equal parts of `inter` columns. Cuts lie at multiples of the mode's MoeModeInfo::multiple, which
// are ends of its blocks of weights. Throws kInvalidArgument, naming the counts of ranks that fit.
NARROWFLOAT_API TensorShard tensor_shard(int64_t inter, MoeMode mode, int rank, int ranks);

struct LoadMoeOptions {
  // Plain weights are quantized to the mode's format; quantized ones must have it already. Default:
  // kBf16 for plain weights, kNvfp4Bf16, kMxfp4Bf16, kMxfp8 or kFp8Block for quantized ones.
  std::optional<MoeMode> mode;
  // Largest |x| of the layer's input and of the intermediate, for the static scales of kFp8Tensor
  // and kNvfp4 (the multiplier is the format's largest value over it). Required by those modes.
  std::optional<float> input_amax;
  std::optional<float> inter_amax;
  int32_t expert_offset = 0;
  std::optional<int32_t> local_experts;  // Default: all from expert_offset on.
  // The expert at each place, for ExpertParallelConfig::places: offset and count are of places,
  // config().routing.experts is their number, and has no groups. Empty: expert e at place e.
  std::vector<int32_t> places;
  // Tensor parallelism: the experts' part tensor_shard(I, mode, tensor_rank, tensor_ranks); the
  // caller adds the ranks' outputs. Rank 0 has bias2. Weights that are quantized here have the
  // global scale of their part.
  int tensor_rank = 0;
  int tensor_ranks = 1;
};

// Layers with experts, ascending. Empty for a model without.
NARROWFLOAT_API std::vector<int64_t> moe_layers(const Checkpoint& checkpoint);

// Owns the weights in canonical order.
class NARROWFLOAT_API LoadedMoe {
 public:
  // Throws kInvalidArgument for a layer without experts or options that do not fit, kCorruptData
  // for weights that do not fit together, kUnsupported for a model whose routing is not known.
  LoadedMoe(const Checkpoint& checkpoint, int64_t layer, const LoadMoeOptions& options = {});

  [[nodiscard]] const MoeConfig& config() const;
  [[nodiscard]] const MoeWeights& weights() const;   // Views into this object.
  [[nodiscard]] WeightFormat stored_format() const;  // Format in the checkpoint.
  [[nodiscard]] uint64_t stored_bytes() const;       // Bytes of the shard there.
  // The logits are x @ router_weight.T + router_logit_bias.
  [[nodiscard]] const TensorView& router_weight() const;      // F32 [E, H]
  [[nodiscard]] const TensorView& router_logit_bias() const;  // F32 [E] or absent.
  // The correction bias of DeepSeek's and MiniMax' routers, which chooses experts and is no part of
  // their weights. F32 [E] or absent: Routing::bias.
  [[nodiscard]] const TensorView& router_bias() const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

}  // namespace narrowfloat
