// Measurements of `narrowfloat moe tune`: a layer at several numbers of tokens, with every token
// tile that may be the fastest.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cli/moe/bench_case.h"
#include "narrowfloat/moe_tuning.h"

namespace narrowfloat::cli {

struct TileTime {
  int32_t token_tile = 0;
  double us = 0;    // Median over the rounds.
  double gain = 1;  // How many times as fast as the rule's tile: median over the rounds.
};

struct TuneResult {
  int64_t tokens = 0;
  int32_t rule_tile = 0;
  double rule_us = 0;
  std::vector<TileTime> tiles;  // In ascending order, that of the rule among them.
  int32_t best_tile = 0;        // The rule's, where no other is faster by the margin.
  double best_us = 0;
  Verdict verdict = Verdict::kNotChecked;  // Of a run with the best tile.
};

// One result for each entry of `tokens`. problem.has_stages does not count.
std::vector<TuneResult> tune_tiles(const MoeBenchProblem& problem, std::span<const int64_t> tokens);

// Entries for the results whose best tile is not the rule's: each from its number of tokens to the
// next one that was measured, but not beyond what the rule's tile is the same for: the gain is over
// that tile.
std::vector<MoeTuningEntry> tuning_entries(const MoeTuningKey& key,
                                           std::vector<TuneResult> results);

}  // namespace narrowfloat::cli
