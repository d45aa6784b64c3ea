// A transformer over bytes in fp32, all but its experts: what `narrowfloat-bench eval` scores text
// with. Whoever calls score() computes the experts, in the mode it wants to measure. The
// architecture is Qwen3-MoE as config.json describes it; models/tiny-moe/README.md has the
// formulas.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "bench_cli/plain_math.h"
#include "narrowfloat/checkpoint.h"

namespace narrowfloat::cli {

struct ModelConfig {
  int64_t hidden = 0;
  int64_t layers = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t vocabulary = 0;
  int64_t window = 0;  // Bytes that are scored together: max_position_embeddings, or 4096.
  double rope_theta = 0;
  float eps = 0;
  bool has_tied_embeddings = false;
};

using Window = std::span<const uint8_t>;  // Text that is scored on its own.

// Adds the experts' output to `residual`. All are dense rows of `hidden` columns, one for each byte
// of all windows: `rows` is the normalised input of the block.
using ExpertFunction =
    std::function<void(int64_t layer, std::span<const float> rows, std::span<float> residual)>;

class TextModel {
 public:
  // Throws kUnsupported for another architecture, for a part of this one that is not computed here,
  // and for a quantized model; kCorruptData for values that do not fit together.
  explicit TextModel(const Checkpoint& checkpoint);

  [[nodiscard]] const ModelConfig& config() const { return config_; }
  // The rows of all windows before the first experts, which no expert has a part in. Windows have
  // 1 to config().window bytes.
  std::vector<float> begin(std::span<const Window> windows) const;
  // Sum of -log2 p over bytes 1, 2, ... of every window; x: begin(windows).
  double score(std::span<const Window> windows, std::vector<float> x,
               const ExpertFunction& experts) const;

 private:
  struct Layer {
    std::vector<float> input_norm, q_norm, k_norm, expert_norm;
    PackedMatrix q, k, v, o;
  };
  struct Scratch;
  class ScratchPool;

  Layer load_layer(const Checkpoint& checkpoint, int64_t index) const;
  // x += attention(rmsnorm(x)), rows = rmsnorm(x), for the rows of one window.
  void attend(const Layer& layer, float* x, int64_t length, Scratch& scratch) const;
  void attend_head(int64_t head, int64_t length, Scratch& scratch) const;
  void norm_and_rotate(float* heads, int64_t count, std::span<const float> norm,
                       int64_t length) const;
  void norm_rows(const float* x, std::span<const float> weight, int64_t length, float* out) const;
  // Calls body(index, position of the window in x, scratch) for every window, on all cores.
  template <typename Body>
  void for_each_window(std::span<const Window> windows, ScratchPool& pool, const Body& body) const;
  double score_window(Window window, const float* x, Scratch& scratch) const;

  ModelConfig config_;
  std::vector<float> embedding_;
  std::vector<Layer> layers_;
  std::vector<float> norm_;
  PackedMatrix head_;
  RotaryTable rotary_;
};

}  // namespace narrowfloat::cli
