// A prepared layer on the CPU or on a GPU whose token tiles change between runs.
#pragma once

#include <optional>
#include <vector>

#include "cli/moe/bench_case.h"
#include "cli/moe/gpu_layer.h"
#include "cli/moe/layer_runner.h"

namespace narrowfloat::cli {

class TimedLayer {
 public:
  // For runs of up to `max_tokens` of the inputs, which must outlive it.
  TimedLayer(const MoeBenchProblem& problem, const BenchInputs& inputs, int64_t max_tokens);

  void take(const MoeTuning& tuning);
  // One range after the other.
  Timing time_runs(const std::vector<TokenRange>& ranges, double min_seconds);
  RunSample sample(TokenRange range);

 private:
  void run_on_host(TokenRange range);

  const BenchInputs& inputs_;
  std::optional<LayerRunner> on_host_;
  std::optional<GpuLayer> on_gpu_;
};

}  // namespace narrowfloat::cli
