// Measurements of `narrowfloat moe bench`: one layer of random weights at several numbers of
// tokens, timed, and a sample of every result compared with an fp64 oracle.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cli/bench/machine.h"
#include "cli/moe/figures.h"
#include "cli/moe/shape.h"
#include "cli/timing.h"
#include "narrowfloat/moe.h"

namespace narrowfloat::cli {

// The part of the experts that one rank has: rank / num_ranks of all.
struct ExpertShard {
  int32_t rank = 0;
  int32_t num_ranks = 1;
};

struct MoeBenchProblem {
  MoeConfig config;
  bool has_bias = false;
  int32_t shape_experts = 0;  // What the layer has before memory limits it.
  std::string routing = "uniform";
  double min_seconds = 0.5;
  Machine* gpu = nullptr;  // Null: on the CPU.
};

// Of a result: kNotChecked where no run had a slot of this rank's experts.
enum class Verdict { kCorrect, kWrong, kNotChecked };

struct MoeBenchResult {
  int64_t tokens = 0;
  // Means over the timed runs, which are on different tokens, and the most tokens that one expert
  // had.
  double experts_hit = 0;
  double local_slots = 0;
  int64_t largest_load = 0;
  LayerWork work;
  Timing timing;
  // A sample of tokens with local slots against Accumulation::kFp64 on the same weights and inputs.
  int64_t checked_tokens = 0;
  Distance error;
  // Correct: within the tolerance of the mode, and a token without local slots is all zeros.
  Verdict verdict = Verdict::kNotChecked;
};

// The layer of `shape` in `mode`, with as many of its experts as `max_bytes` hold together with the
// prepared copy and the buffers for `max_tokens`. Throws kInvalidArgument where the mode cannot
// have these extents, or not even the fewest experts fit.
MoeConfig bench_config(const MoeShape& shape, MoeMode mode, const ExpertShard& shard,
                       int64_t max_tokens, uint64_t max_bytes);

// One result for each entry of `tokens`.
std::vector<MoeBenchResult> run_moe_bench(const MoeBenchProblem& problem,
                                          std::span<const int64_t> tokens);

}  // namespace narrowfloat::cli
