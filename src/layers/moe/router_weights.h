// The router of a layer from a checkpoint, and unquantized tensors read as fp32.
#pragma once

#include <string>
#include <vector>

#include "layers/moe/model_config.h"
#include "narrowfloat/checkpoint.h"

namespace narrowfloat {

// F32 values and the view of them; absent where there are none.
struct OwnedFloats {
  std::vector<float> values;
  TensorView view;
};

struct RouterWeights {
  OwnedFloats weight;           // [E, H]
  OwnedFloats logit_bias;       // [E]: a part of the logits.
  OwnedFloats correction_bias;  // [E]: selects experts, is no part of their weights.
};

// block: "model.layers.3.mlp". Throws kCorruptData where a tensor that the model needs is missing
// or has another shape; kUnsupported for other types than F32, BF16 and F16.
RouterWeights read_router(const Checkpoint& checkpoint, const std::string& block,
                          const MoeModelConfig& model, int64_t hidden);

// Reads `count` elements from `first` on.
std::vector<float> read_plain_f32(const Checkpoint& checkpoint, const CheckpointTensor& tensor,
                                  int64_t first, int64_t count);

void require_shape(const Checkpoint& checkpoint, const CheckpointTensor& tensor,
                   const std::vector<int64_t>& shape);

}  // namespace narrowfloat
