// A prepared MoE layer with the buffers that its runs need: eval, moe run and moe bench run layers
// through this.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "narrowfloat/moe_tuning.h"

namespace narrowfloat::cli {

// Bytes whose address is a multiple of 256, as workspaces want it.
class AlignedBytes {
 public:
  explicit AlignedBytes(int64_t size_bytes);
  [[nodiscard]] TensorView view() const;  // U8 [size]

 private:
  int64_t size_;
  std::vector<std::byte> storage_;
};

class LayerRunner {
 public:
  // For runs of up to `max_tokens` tokens. Keeps nothing of `weights`.
  LayerRunner(const MoeWeights& weights, const MoeConfig& config, int64_t max_tokens);

  [[nodiscard]] const MoeConfig& config() const { return layer_.config(); }
  // Token tiles of later runs.
  void take(const MoeTuning& tuning);
  void run(const TensorView& rows, const Routing& routing, MoeStage last = MoeStage::kCombine);
  [[nodiscard]] int32_t token_tile(int64_t tokens) const { return layer_.token_tile(tokens); }
  // Of the last run: [T, H] as fp32, and the experts [T, k + S] that it used.
  [[nodiscard]] std::vector<float> output() const;
  [[nodiscard]] std::span<const int32_t> ids() const;

 private:
  MoeLayer layer_;
  int64_t max_tokens_;
  AlignedBytes workspace_;
  std::vector<std::byte> out_;
  std::vector<int32_t> ids_;
  int64_t tokens_ = 0;
};

// Views of dense rows in memory.
TensorView matrix_view(std::span<const float> values, int64_t cols);
TensorView matrix_view(std::span<const uint16_t> values, int64_t cols);  // BF16

}  // namespace narrowfloat::cli
