// Tiles take turns within a round, so that a change of the machine's speed meets all of them; what
// counts is how many times as fast as the rule's tile one is in the same round.
#include "cli/moe/tune_case.h"

#include <algorithm>
#include <array>

#include "cli/moe/timed_layer.h"

namespace narrowfloat::cli {
namespace {

constexpr int kRounds = 5;
constexpr int64_t kMaxRanges = 32;
constexpr std::array<int32_t, 5> kTiles{8, 16, 32, 64, 128};

// One tile for runs on so many tokens, as a tuning of one entry that nobody measured.
MoeTuning one_tile(const MoeTuningKey& key, int64_t tokens, int32_t tile) {
  return MoeTuning({{.key = key,
                     .first_tokens = tokens,
                     .last_tokens = tokens,
                     .token_tile = tile,
                     .rule_tile = tile,
                     .us = 1,
                     .rule_us = 2}});
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

std::vector<TokenRange> ranges_of(const BenchInputs& inputs, int64_t tokens) {
  std::vector<TokenRange> ranges;
  const int64_t count = std::min(inputs.routing.tokens() / tokens, kMaxRanges);
  for (int64_t i = 0; i < count; ++i) ranges.push_back({i * tokens, tokens});
  return ranges;
}

// The rule's tile and those up to four times as small or as large.
std::vector<int32_t> candidate_tiles(int32_t rule) {
  std::vector<int32_t> tiles;
  for (const int32_t tile : kTiles) {
    if (tile >= rule / 4 && tile <= 4 * rule) tiles.push_back(tile);
  }
  return tiles;
}

TuneResult tune(const MoeBenchProblem& problem, const BenchInputs& inputs, int64_t tokens,
                TimedLayer& layer) {
  const MoeConfig& config = problem.config;
  const MoeTuningKey key =
      moe_tuning_key(config, problem.gpu == nullptr ? Device{} : problem.gpu->device());
  TuneResult result;
  result.tokens = tokens;
  result.rule_tile = default_token_tile(tokens, key.slots, key.local_experts);
  const std::vector<int32_t> tiles = candidate_tiles(result.rule_tile);
  const std::vector<TokenRange> ranges = ranges_of(inputs, tokens);
  std::vector<std::vector<double>> us(tiles.size());
  for (int round = 0; round < kRounds; ++round) {
    for (size_t i = 0; i < tiles.size(); ++i) {
      layer.take(one_tile(key, tokens, tiles[i]));
      const Timing timing = layer.time_runs(ranges, problem.min_seconds / kRounds);
      us[i].push_back(1e6 * timing.median_seconds);
    }
  }
  const auto rule =
      static_cast<size_t>(std::find(tiles.begin(), tiles.end(), result.rule_tile) - tiles.begin());
  result.rule_us = result.best_us = median(us[rule]);
  result.best_tile = result.rule_tile;
  double best_gain = MoeTuning::kMinGain;
  for (size_t i = 0; i < tiles.size(); ++i) {
    std::vector<double> gains;
    for (size_t round = 0; round < us[i].size(); ++round) {
      gains.push_back(us[rule][round] / us[i][round]);
    }
    const TileTime time{tiles[i], median(us[i]), median(gains)};
    result.tiles.push_back(time);
    // By both figures: an entry states the times.
    if (std::min(time.gain, result.rule_us / time.us) < best_gain) continue;
    best_gain = time.gain;
    result.best_tile = time.token_tile;
    result.best_us = time.us;
  }
  layer.take(one_tile(key, tokens, result.best_tile));
  result.verdict = check_run(inputs, problem.has_bias, layer.sample(ranges.back())).verdict;
  return result;
}

// The last number of tokens up to `last` for which the rule still says what it says for `first`: it
// never decreases.
int64_t end_of_rule(const MoeTuningKey& key, int64_t first, int64_t last) {
  const auto rule = [&](int64_t tokens) {
    return default_token_tile(tokens, key.slots, key.local_experts);
  };
  const int32_t tile = rule(first);
  while (first < last) {
    const int64_t middle = first + (last - first + 1) / 2;
    if (rule(middle) == tile) {
      first = middle;
    } else {
      last = middle - 1;
    }
  }
  return last;
}

}  // namespace

std::vector<TuneResult> tune_tiles(const MoeBenchProblem& problem,
                                   std::span<const int64_t> tokens) {
  const int64_t max_tokens = *std::max_element(tokens.begin(), tokens.end());
  const BenchInputs inputs = bench_inputs(problem, max_tokens);
  TimedLayer layer(problem, inputs, max_tokens);
  std::vector<TuneResult> results;
  for (const int64_t count : tokens) results.push_back(tune(problem, inputs, count, layer));
  return results;
}

std::vector<MoeTuningEntry> tuning_entries(const MoeTuningKey& key,
                                           std::vector<TuneResult> results) {
  const auto by_tokens = [](const TuneResult& a, const TuneResult& b) {
    return a.tokens < b.tokens;
  };
  std::sort(results.begin(), results.end(), by_tokens);
  std::vector<MoeTuningEntry> entries;
  for (size_t i = 0; i < results.size(); ++i) {
    const TuneResult& result = results[i];
    if (result.best_tile == result.rule_tile || result.verdict == Verdict::kWrong) continue;
    const int64_t next = i + 1 == results.size() ? result.tokens + 1 : results[i + 1].tokens;
    entries.push_back({.key = key,
                       .first_tokens = result.tokens,
                       .last_tokens = end_of_rule(key, result.tokens, next - 1),
                       .token_tile = result.best_tile,
                       .rule_tile = result.rule_tile,
                       .us = result.best_us,
                       .rule_us = result.rule_us});
  }
  return entries;
}

}  // namespace narrowfloat::cli
