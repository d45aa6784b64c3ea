// The public grouped GEMM: check, then run the implementation that packed the weights.
#include <limits>

#include "base/throw_error.h"
#include "ops/grouped_gemm/grouped_gemm_checks.h"

namespace narrowfloat {

int64_t grouped_gemm_workspace(const GroupedWeights& weights, int64_t a_rows,
                               Accumulation accumulation) {
  // Row numbers are int32 (moe spec 1.8).
  constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();
  if (a_rows < 0 || a_rows > kMaxRows) {
    throw_invalid("a_rows: expected 0 to {}, got {}", kMaxRows, a_rows);
  }
  const PackedWeights& state = packed_weights(weights);
  return state.impl->workspace_bytes(state.problem, a_rows, accumulation);
}

DequantizedRows dequantized_rows(const GroupedWeights& weights, int64_t a_rows,
                                 const TensorView& workspace) {
  const PackedWeights& state = packed_weights(weights);
  return state.impl->dequantized_rows(state.problem, a_rows, static_cast<uint8_t*>(workspace.data));
}

void require_tiles(const GroupedWeights& weights, int64_t count, int64_t token_tile) {
  const PackedWeights& state = packed_weights(weights);
  const Support support = state.impl->supports_tiles(state.problem, count, token_tile);
  if (support.ok()) return;
  throw_invalid("permutation.tile_to_expert: {}; take larger token tiles or split the batch",
                support.reason());
}

void grouped_gemm(const GroupedGemmArgs& args, const GroupedWeights& weights,
                  const TensorView& workspace, const LayerGemm& layer, Stream stream) {
  GemmCall call = checked_call(args, weights, workspace);
  call.layer = layer;
  call.activation.decoded = layer.activated.values;
  require_tiles(weights, call.tiles.count, call.tiles.token_tile);
  const PackedWeights& state = packed_weights(weights);
  state.impl->run(state.problem, call, stream);
}

void grouped_gemm(const GroupedGemmArgs& args, const GroupedWeights& weights,
                  const TensorView& workspace, Stream stream) {
  grouped_gemm(args, weights, workspace, LayerGemm{}, stream);
}

}  // namespace narrowfloat
