// A transformer over bytes in fp32, all but its experts: what `narrowfloat eval` scores text with.
// Whoever calls forward() computes the experts, in the mode it wants to measure.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "cli/eval/model_config.h"
#include "cli/plain_math.h"
#include "narrowfloat/checkpoint.h"

namespace narrowfloat::cli {

using Window = std::span<const uint8_t>;  // Text that is scored on its own.

// Adds the experts' output to `residual`. All are dense rows of `hidden` columns, one for each byte
// of all windows: `rows` is the normalised input of the block.
using ExpertFunction =
    std::function<void(int64_t layer, std::span<const float> rows, std::span<float> residual)>;

class TextModel {
 public:
  // Throws kUnsupported for a model that is not of ModelConfig's kind, or is quantized.
  explicit TextModel(const Checkpoint& checkpoint);

  [[nodiscard]] const ModelConfig& config() const { return config_; }
  // Sum of -log2 p over bytes 1, 2, ... of every window. Windows have 1 to config().window bytes.
  double score(std::span<const Window> windows, const ExpertFunction& experts) const;

 private:
  struct Layer {
    std::vector<float> input_norm, q_norm, k_norm, expert_norm;
    PackedMatrix q, k, v, o;
  };
  struct Scratch;

  Layer load_layer(const Checkpoint& checkpoint, int64_t index) const;
  // Rows of one window: x += attention(rmsnorm(x)), rows = rmsnorm(x).
  void attend(const Layer& layer, float* x, int64_t length, Scratch& scratch) const;
  void attend_head(int64_t head, int64_t length, Scratch& scratch) const;
  void norm_and_rotate(float* heads, int64_t count, std::span<const float> norm,
                       int64_t length) const;
  void norm_rows(const float* x, std::span<const float> weight, int64_t length, float* out) const;
  double score_window(Window window, const float* x, Scratch& scratch) const;

  ModelConfig config_;
  std::vector<float> embedding_;
  std::vector<Layer> layers_;
  std::vector<float> norm_;
  PackedMatrix head_;
  RotaryTable rotary_;
};

}  // namespace narrowfloat::cli
