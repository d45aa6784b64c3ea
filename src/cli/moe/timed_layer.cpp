// See timed_layer.h.
#include "cli/moe/timed_layer.h"

#include "cli/moe/random_layer.h"

namespace narrowfloat::cli {

TimedLayer::TimedLayer(const MoeBenchProblem& problem, const BenchInputs& inputs,
                       int64_t max_tokens)
    : inputs_(inputs) {
  RandomWeights weights(problem.config, problem.has_bias);
  if (problem.gpu == nullptr) {
    weights.fill();
    on_host_.emplace(weights.weights(), problem.config, max_tokens);
    return;
  }
  on_gpu_.emplace(*problem.gpu, weights, problem.config);
  const int64_t all = inputs.routing.tokens();
  on_gpu_->load(inputs.range(0, all), inputs.routing.range(0, all), max_tokens);
}

void TimedLayer::take(const MoeTuning& tuning) {
  if (on_gpu_) {
    on_gpu_->take(tuning);
  } else {
    on_host_->take(tuning);
  }
}

void TimedLayer::run_on_host(TokenRange range) {
  on_host_->run(inputs_.range(range.begin, range.count),
                inputs_.routing.range(range.begin, range.count));
}

Timing TimedLayer::time_runs(const std::vector<TokenRange>& ranges, double min_seconds) {
  if (on_gpu_) return on_gpu_->time_runs(ranges, min_seconds);
  size_t num_runs = 0;
  return cli::time_runs([&] { run_on_host(ranges[num_runs++ % ranges.size()]); }, min_seconds);
}

RunSample TimedLayer::sample(TokenRange range) {
  if (on_gpu_) {
    on_gpu_->run(range);
    return sample_run(inputs_.config, on_gpu_->output(), on_gpu_->ids(), range.begin);
  }
  run_on_host(range);
  return sample_run(inputs_.config, on_host_->output(), on_host_->ids(), range.begin);
}

}  // namespace narrowfloat::cli
