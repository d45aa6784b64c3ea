// See router_weights.h.
#include "layers/moe/router_weights.h"

#include <fmt/ranges.h>

#include "base/throw_error.h"
#include "checkpoint/escape.h"
#include "layers/moe/expert_loader.h"
#include "tensor/element_io.h"

namespace narrowfloat {
namespace {

// Reads a vector or a matrix.
OwnedFloats read_floats(const Checkpoint& checkpoint, const CheckpointTensor& tensor) {
  OwnedFloats floats;
  floats.values = read_plain_f32(checkpoint, tensor, 0, tensor.info.num_elements());
  const std::vector<int64_t>& shape = tensor.info.shape;
  const auto view = [&](std::initializer_list<int64_t> extents) {
    return TensorView::contiguous(floats.values.data(), DType::kF32, extents);
  };
  floats.view = shape.size() == 1 ? view({shape[0]}) : view({shape[0], shape[1]});
  return floats;
}

// Reads [E] from the first of these tensors that exists.
OwnedFloats read_bias(const Checkpoint& checkpoint, const std::vector<std::string>& names,
                      int64_t experts) {
  for (const std::string& name : names) {
    const CheckpointTensor* bias = checkpoint.find(name);
    if (bias == nullptr) continue;
    require_shape(checkpoint, *bias, {experts});
    return read_floats(checkpoint, *bias);
  }
  throw_error(ErrorKind::kCorruptData, "{}: expected the router's '{}' with shape [{}]",
              printable(checkpoint.path()), printable(names.front()), experts);
}

}  // namespace

RouterWeights read_router(const Checkpoint& checkpoint, const std::string& block,
                          const MoeModelConfig& model, int64_t hidden) {
  const int64_t experts = model.routing.experts;
  // Models call their router gate or router.
  const bool is_gate = checkpoint.find(block + ".router.weight") == nullptr;
  const std::string stem = block + (is_gate ? ".gate." : ".router.");
  const CheckpointTensor* weight = checkpoint.find(stem + "weight");
  if (weight == nullptr || weight->info.shape != std::vector{experts, hidden}) {
    throw_error(ErrorKind::kCorruptData, "{}: expected the router '{}weight' with shape [{}, {}]",
                printable(checkpoint.path()), printable(stem), experts, hidden);
  }
  RouterWeights router;
  router.weight = read_floats(checkpoint, *weight);
  if (model.has_logit_bias) {
    router.logit_bias = read_bias(checkpoint, {stem + "bias"}, experts);
  }
  const RoutingMethod method = model.routing.method;
  if (method == RoutingMethod::kDeepSeekV3 || method == RoutingMethod::kMiniMax2) {
    // The bias is named after the router, or in MiniMax after the layer's block.
    const std::string name = "e_score_correction_bias";
    router.correction_bias = read_bias(checkpoint, {stem + name, block + "." + name}, experts);
  }
  return router;
}

std::vector<float> read_plain_f32(const Checkpoint& checkpoint, const CheckpointTensor& tensor,
                                  int64_t first, int64_t count) {
  require_float(checkpoint, tensor);
  const DType dtype = tensor.info.dtype;
  const auto size = static_cast<uint64_t>(bits(dtype)) / 8;
  std::vector<std::byte> bytes(static_cast<uint64_t>(count) * size);
  checkpoint.read(tensor, static_cast<uint64_t>(first) * size, bytes);
  std::vector<float> result(static_cast<size_t>(count));
  widen(dtype, bytes.data(), count, result.data());
  return result;
}

void require_shape(const Checkpoint& checkpoint, const CheckpointTensor& tensor,
                   const std::vector<int64_t>& shape) {
  if (tensor.info.shape == shape) return;
  throw_error(ErrorKind::kCorruptData, "{}: tensor '{}': expected shape [{}], got [{}]",
              printable(checkpoint.path()), printable(tensor.info.name), fmt::join(shape, ", "),
              fmt::join(tensor.info.shape, ", "));
}

}  // namespace narrowfloat
