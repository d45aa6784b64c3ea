// Measurements of `narrowfloat moe bench`: one layer of random weights at several numbers of
// tokens, timed, and a sample of every result compared with an fp64 oracle.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cli/bench/machine.h"
#include "cli/moe/bench_check.h"
#include "cli/moe/bench_config.h"
#include "cli/moe/figures.h"
#include "cli/timing.h"
#include "narrowfloat/moe_tuning.h"

namespace narrowfloat::cli {

struct MoeBenchProblem {
  MoeConfig config;
  bool has_bias = false;
  int32_t shape_experts = 0;  // What the layer has before memory limits it.
  std::string routing = "uniform";
  double min_seconds = 0.5;
  bool has_stages = false;  // Stages are timed, too.
  Machine* gpu = nullptr;   // Null: on the CPU.
  MoeTuning tuning;
};

// What a run takes longer to the end of a stage than to the end of the one before.
struct StageTime {
  MoeStage stage = MoeStage::kRoute;
  double median_seconds = 0;
  int64_t launches = 0;  // On a GPU.
};

struct MoeBenchResult {
  int64_t tokens = 0;
  int32_t token_tile = 0;
  // Means over the timed runs, which are on different tokens, and the most tokens that one expert
  // had.
  double experts_hit = 0;
  double local_slots = 0;
  int64_t largest_load = 0;
  LayerWork work;
  Timing timing;
  int64_t launches = 0;  // Of a run on a GPU.
  std::vector<StageTime> stages;
  CheckedRun check;
};

// Rows and routing for runs of up to so many tokens.
BenchInputs bench_inputs(const MoeBenchProblem& problem, int64_t max_tokens);

// One result for each entry of `tokens`.
std::vector<MoeBenchResult> run_moe_bench(const MoeBenchProblem& problem,
                                          std::span<const int64_t> tokens);

}  // namespace narrowfloat::cli
