// The experts of all layers of a model in one mode, and the static scales that some modes need.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cli/eval/text_model.h"
#include "cli/moe/calibration.h"
#include "cli/moe/layer_runner.h"
#include "narrowfloat/moe_checkpoint.h"

namespace narrowfloat::cli {

// A row of eval's table: a mode of the layer, or (without one) everything in fp32.
using EvalMode = std::optional<MoeMode>;
std::string eval_mode_name(EvalMode mode);
double bits_per_weight(EvalMode mode);

class ModelExperts {
 public:
  // `maxima`: of every layer, for modes with static scales; else it may be empty.
  ModelExperts(const Checkpoint& checkpoint, const ModelConfig& model, EvalMode mode,
               std::span<const LayerMaxima> maxima, int64_t max_tokens);

  // Adds the experts' output for `rows` to `residual`: an ExpertFunction.
  void add_output(int64_t layer, std::span<const float> rows, std::span<float> residual);

 private:
  struct Layer {
    LoadedMoe loaded;
    LayerRunner runner;
  };
  std::vector<Layer> layers_;
};

struct ModelMaxima {
  std::vector<LayerMaxima> layers;
  std::string source;  // What they were measured on.
};
// From DIR/calibration/activations.safetensors, or (without that file) from a pass over `window`.
ModelMaxima model_maxima(const Checkpoint& checkpoint, const TextModel& model, Window window);

}  // namespace narrowfloat::cli
