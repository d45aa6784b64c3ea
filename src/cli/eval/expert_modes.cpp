// Rows go into the experts as bf16 in every mode, as in a model that is served, and come out as
// fp32 into the fp32 residual stream: what differs between modes is the mode.
#include "cli/eval/expert_modes.h"

#include <fmt/format.h>

#include "cli/float_tensors.h"
#include "cli/moe/activations.h"
#include "narrowfloat/error.h"

namespace narrowfloat::cli {
namespace {

LoadMoeOptions load_options(EvalMode mode, std::span<const LayerMaxima> maxima, size_t layer) {
  LoadMoeOptions options;
  options.mode = mode.value_or(MoeMode::kBf16);
  if (has_static_scales(*options.mode)) {
    options.input_amax = maxima[layer].input;
    options.inter_amax = maxima[layer].inter;
  }
  return options;
}

MoeConfig run_config(const LoadedMoe& loaded, EvalMode mode) {
  MoeConfig config = loaded.config();
  config.out_dtype = DType::kF32;
  if (!mode) {
    config.fp32_rows = true;
    config.slot_dtype = DType::kF32;
  }
  return config;
}

LoadedMoe load_layer(const Checkpoint& checkpoint, const ModelConfig& model, int64_t layer,
                     const LoadMoeOptions& options) {
  LoadedMoe loaded(checkpoint, layer, options);
  if (loaded.config().hidden != model.hidden) {
    throw Error(
        ErrorKind::kCorruptData,
        fmt::format("{}: the experts of layer {} have hidden size {}, config.json says {}",
                    printable(checkpoint.path()), layer, loaded.config().hidden, model.hidden));
  }
  return loaded;
}

}  // namespace

std::string eval_mode_name(EvalMode mode) { return mode ? std::string(name(*mode)) : "fp32"; }

double bits_per_weight(EvalMode mode) {
  return moe_mode_info(mode.value_or(MoeMode::kBf16)).bits_per_weight;
}

ModelExperts::ModelExperts(const Checkpoint& checkpoint, const ModelConfig& model, EvalMode mode,
                           std::span<const LayerMaxima> maxima, int64_t max_tokens) {
  for (int64_t l = 0; l < model.layers; ++l) {
    LoadedMoe loaded = load_layer(checkpoint, model, l, load_options(mode, maxima, layers_.size()));
    LayerRunner runner(loaded.weights(), run_config(loaded, mode), max_tokens);
    layers_.push_back({std::move(loaded), std::move(runner)});
  }
}

void ModelExperts::add_output(int64_t layer, std::span<const float> rows,
                              std::span<float> residual) {
  auto& [loaded, runner] = layers_[static_cast<size_t>(layer)];
  const MoeConfig& config = runner.config();
  const std::vector<float> logits = router_logits(loaded, rows);
  Routing routing;
  routing.logits = matrix_view(logits, config.routing.experts);
  routing.bias = loaded.router_bias();
  if (config.fp32_rows) {
    runner.run(matrix_view(rows, config.hidden), routing);
  } else {
    const std::vector<uint16_t> rounded = to_bf16(rows);
    runner.run(matrix_view(rounded, config.hidden), routing);
  }
  const std::vector<float> output = runner.output();
  for (size_t i = 0; i < output.size(); ++i) residual[i] += output[i];
}

ModelMaxima model_maxima(const Checkpoint& checkpoint, const TextModel& model, Window window) {
  ModelMaxima maxima;
  const std::optional<std::string> path = default_activations(checkpoint.path());
  std::vector<LoadedMoe> layers;
  LoadMoeOptions plain;
  plain.mode = MoeMode::kBf16;
  for (int64_t l = 0; l < model.config().layers; ++l) {
    layers.push_back(load_layer(checkpoint, model.config(), l, plain));
  }
  if (path) {
    maxima.source = *path;
    for (size_t l = 0; l < layers.size(); ++l) {
      const Activations activations =
          read_activations(*path, static_cast<int64_t>(l), layers[l], 0);
      maxima.layers.push_back(measure_maxima(layers[l], activations.rows, activations.logits));
      require_usable(maxima.layers.back(), static_cast<int64_t>(l), *path);
    }
    return maxima;
  }
  maxima.source = fmt::format("the first {} bytes of the text", window.size());
  ModelExperts experts(checkpoint, model.config(), std::nullopt, {},
                       static_cast<int64_t>(window.size()));
  const auto measure = [&](int64_t l, std::span<const float> rows, std::span<float> residual) {
    const LoadedMoe& layer = layers[static_cast<size_t>(l)];
    maxima.layers.push_back(measure_maxima(layer, rows, router_logits(layer, rows)));
    require_usable(maxima.layers.back(), l, maxima.source);
    experts.add_output(l, rows, residual);
  };
  model.score(std::span(&window, 1), measure);
  return maxima;
}

}  // namespace narrowfloat::cli
