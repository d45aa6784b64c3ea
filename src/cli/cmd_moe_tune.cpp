// narrowfloat moe tune: measures token tiles of a layer with made-up weights, and writes those that
// are faster than the rule by a margin into a file that layers can take. Tiles alternate within a
// round, so that a change of the machine's speed meets all of them; what counts is how many times
// as fast as the rule's tile one is in the same round. A result outside of its tolerance is exit
// code 1.
#include <algorithm>
#include <array>

#include <fmt/format.h>

#include "cli/commands.h"
#include "cli_common/command_line.h"
#include "cli_common/moe/layer_inputs.h"
#include "cli_common/moe/layer_options.h"
#include "cli_common/moe/layer_runner.h"
#include "cli_common/output.h"
#include "narrowfloat/error.h"
#include "narrowfloat/runtime.h"
#include "narrowfloat/safetensors.h"

namespace narrowfloat::cli {
namespace {

constexpr const char* kTuneExamples = R"(Examples:
  narrowfloat moe tune --shape qwen3-30b-a3b --device cuda --out h100.json
  narrowfloat-bench moe bench --shape qwen3-30b-a3b --device cuda --tuning h100.json
)";

struct MoeTuneArguments {
  OutputArguments output;
  LayerArguments layer;
  Device device;
  std::vector<int64_t> tokens = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096};
  std::string routing = "uniform";
  uint64_t max_memory_bytes = 0;  // 0: six tenths of what is available.
  std::string target;             // Empty: nothing is written.
  bool is_forced = false;         // An existing target is replaced.
  int num_threads = 0;
  double min_seconds = 0.5;
};

constexpr int kRounds = 5;
constexpr int64_t kMaxRanges = 32;
constexpr std::array<int32_t, 5> kTiles{8, 16, 32, 64, 128};

struct TileTime {
  int32_t token_tile = 0;
  double us = 0;    // Median over the rounds.
  double gain = 1;  // The median over the rounds of how many times as fast as the rule's it is.
};

struct TuneResult {
  int64_t tokens = 0;
  int32_t rule_tile = 0;
  double rule_us = 0;
  std::vector<TileTime> tiles;  // In ascending order, the rule's among them.
  int32_t best_tile = 0;        // The rule's, where no other is faster by the margin.
  double best_us = 0;
  Verdict verdict = Verdict::kNotChecked;  // The check of a run with the best tile.
};

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

// The rule's tile and those up to four times as small or as large.
std::vector<int32_t> candidate_tiles(int32_t rule) {
  std::vector<int32_t> tiles;
  for (const int32_t tile : kTiles) {
    if (tile >= rule / 4 && tile <= 4 * rule) tiles.push_back(tile);
  }
  return tiles;
}

TuneResult tune(const BenchInputs& inputs, int64_t tokens, double min_seconds, Device device,
                LayerRunner& layer) {
  const MoeTuningKey key = moe_tuning_key(inputs.layer.config, device);
  TuneResult result;
  result.tokens = tokens;
  result.rule_tile = default_token_tile(tokens, key.slots, key.local_experts);
  const std::vector<int32_t> tiles = candidate_tiles(result.rule_tile);
  const std::vector<TokenRange> ranges = inputs.ranges(tokens);
  std::vector<std::vector<double>> us(tiles.size());
  for (int round = 0; round < kRounds; ++round) {
    for (size_t i = 0; i < tiles.size(); ++i) {
      layer.take(one_tile(key, tokens, tiles[i]));
      us[i].push_back(layer.time_runs(ranges, min_seconds / kRounds).median_us);
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
    // Both figures must say so: an entry states the times.
    if (std::min(time.gain, result.rule_us / time.us) < best_gain) continue;
    best_gain = time.gain;
    result.best_tile = time.token_tile;
    result.best_us = time.us;
  }
  layer.take(one_tile(key, tokens, result.best_tile));
  layer.run(ranges.back());
  result.verdict = check_run(inputs, sample_run(inputs.layer.config, layer.output(), layer.ids(),
                                                ranges.back().begin))
                       .verdict;
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

// Returns one result for each entry of `tokens`, which ascend.
std::vector<TuneResult> tune_tiles(const BenchLayer& layer, const std::vector<int64_t>& tokens,
                                   double min_seconds, Machine& machine) {
  const int64_t max_tokens = tokens.back();
  const BenchInputs inputs = bench_inputs(layer, max_tokens);
  LayerRunner runner(machine, RandomWeights(layer.config, layer.has_bias), layer.config);
  const TokenRange all{0, inputs.routing.tokens()};
  runner.load(inputs.rows_of(all), inputs.routing.range(all.begin, all.count), max_tokens);
  std::vector<TuneResult> results;
  results.reserve(tokens.size());
  for (const int64_t count : tokens) {
    results.push_back(tune(inputs, count, min_seconds, machine.device(), runner));
  }
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

struct TuneReport {
  MoeShape shape;
  std::string machine;
  std::vector<std::string> notes;
  std::vector<std::pair<MoeConfig, std::vector<TuneResult>>> modes;
  std::vector<MoeTuningEntry> entries;
};

bool is_tuned(const TuneResult& result) { return result.best_tile != result.rule_tile; }

Json case_json(const MoeConfig& config, const TuneResult& result) {
  Json tiles = Json::array();
  for (const TileTime& time : result.tiles) {
    tiles.push_back(Json{{"token_tile", time.token_tile}, {"us", time.us}, {"gain", time.gain}});
  }
  return Json{{"mode", name(config.mode)},
              {"tokens", result.tokens},
              {"experts", config.routing.experts},
              {"local_experts", config.local_experts},
              {"rule_tile", result.rule_tile},
              {"rule_us", result.rule_us},
              {"tiles", tiles},
              {"best_tile", result.best_tile},
              {"best_us", result.best_us},
              {"tuned", is_tuned(result)},
              {"correct", result.verdict == Verdict::kNotChecked
                              ? Json(nullptr)
                              : Json(result.verdict == Verdict::kCorrect)}};
}

void print_document(const MoeTuneArguments& arguments, const TuneReport& report) {
  Json document = json_document("moe tune");
  document["version"] = version();
  document["device"] = to_string(arguments.device);
  document["machine"] = report.machine;
  document["threads"] = num_threads();
  document["environment"] = environment_settings();
  document["shape"] = report.shape.name;
  document["routing"] = arguments.routing;
  document["rank"] = arguments.layer.shard.rank;
  document["ranks"] = arguments.layer.shard.num_ranks;
  document["min_gain"] = MoeTuning::kMinGain;
  document["target"] = arguments.target;
  document["entries"] = report.entries.size();
  document["notes"] = report.notes;
  document["cases"] = Json::array();
  for (const auto& [config, results] : report.modes) {
    for (const TuneResult& result : results) document["cases"].push_back(case_json(config, result));
  }
  print_json(document);
}

std::string us_text(double us) { return fmt::format("{:.{}f}", us, us < 1000 ? 2 : 0); }

void print_table(const MoeTuneArguments& arguments, const TuneReport& report) {
  using enum Table::Align;
  Table table({{"mode", kLeft},
               {"tokens", kRight},
               {"rule_tile", kRight},
               {"rule_us", kRight},
               {"best_tile", kRight},
               {"best_us", kRight},
               {"all_us", kLeft},
               {"result", kLeft}});
  for (const auto& [config, results] : report.modes) {
    for (const TuneResult& result : results) {
      std::string all;
      for (const TileTime& time : result.tiles) {
        all += fmt::format("{}{}: {}", all.empty() ? "" : ", ", time.token_tile, us_text(time.us));
      }
      const bool is_wrong = result.verdict == Verdict::kWrong;
      table.add_row({std::string(name(config.mode)), std::to_string(result.tokens),
                     std::to_string(result.rule_tile), us_text(result.rule_us),
                     std::to_string(result.best_tile), us_text(result.best_us), all,
                     is_wrong           ? "WRONG"
                     : is_tuned(result) ? "tuned"
                                        : "rule"},
                    is_wrong           ? Tone::kBad
                    : is_tuned(result) ? Tone::kGood
                                       : Tone::kPlain);
    }
  }
  std::string text =
      fmt::format("{} on {}, {}\n", report.shape.name, to_string(arguments.device), report.machine);
  for (const std::string& note : report.notes) text += note + "\n";
  text += '\n';
  text += table.to_text(is_colored(arguments.output.color));
  if (!arguments.target.empty()) {
    text += fmt::format("\n{} entries in {}\n", report.entries.size(), escaped(arguments.target));
  }
  write_stdout(text);
}

void check_room(const MoeConfig& config, const MoeShape& shape) {
  if (config.routing.experts == shape.routing.experts) return;
  throw Error(
      ErrorKind::kInvalidArgument,
      fmt::format("--shape {}: only {} of {} experts fit into memory in mode {}, and a "
                  "tuning is for all of them; see --max-memory, --ep",
                  shape.name, config.routing.experts, shape.routing.experts, name(config.mode)));
}

ExitCode run_moe_tune(const MoeTuneArguments& arguments) {
  set_num_threads(arguments.num_threads);
  if (!arguments.target.empty()) {
    check_output_file("--out", arguments.target, arguments.is_forced);
  }
  std::vector<int64_t> tokens = arguments.tokens;
  std::sort(tokens.begin(), tokens.end());
  tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
  TuneReport report;
  report.shape = parse_moe_shape(arguments.layer.shape);
  const std::unique_ptr<Machine> machine = open_machine(arguments.device);
  report.machine = machine->facts().name;
  const uint64_t memory = memory_limit(arguments.max_memory_bytes, *machine);
  // All configurations are made before the first run, so that no mistake shows after minutes.
  for (const MoeMode mode :
       modes_of(arguments.layer, report.shape, arguments.device, report.notes)) {
    const MoeConfig config =
        layer_config(report.shape, mode, arguments.layer.shard, tokens.back(), memory);
    check_room(config, report.shape);
    report.modes.emplace_back(config, std::vector<TuneResult>{});
  }
  ExitCode code = ExitCode::kDone;
  for (auto& [config, results] : report.modes) {
    const BenchLayer layer{.config = config,
                           .has_bias = report.shape.has_bias,
                           .shape_experts = report.shape.routing.experts,
                           .routing = arguments.routing};
    results = tune_tiles(layer, tokens, arguments.min_seconds, *machine);
    for (const TuneResult& result : results) {
      if (result.verdict == Verdict::kWrong) code = ExitCode::kFindings;
    }
    const std::vector<MoeTuningEntry> entries =
        tuning_entries(moe_tuning_key(config, arguments.device), results);
    report.entries.insert(report.entries.end(), entries.begin(), entries.end());
  }
  if (arguments.output.data == DataFormat::kJson) {
    print_document(arguments, report);
  } else if (!arguments.output.is_quiet) {
    print_table(arguments, report);
  }
  // The file is written after the output, so that whoever cannot write it has the results.
  if (!arguments.target.empty()) {
    MoeTuning(report.entries).save(arguments.target, arguments.is_forced);
  }
  return code;
}

}  // namespace

void add_moe_tune(const Commands& commands) {
  CLI::App& command =
      add_command(commands, "tune",
                  "Find token tiles that are faster than the rule's, by measuring", kTuneExamples);
  MoeTuneArguments& arguments = arguments_of(command, commands, run_moe_tune);
  add_layer(command, arguments.layer);
  add_tokens(command, arguments.tokens, "the powers of two up to 4096");
  add_routing(command, arguments.routing);
  add_memory(command, arguments.max_memory_bytes, "are refused");
  command
      .add_option("-o,--out", arguments.target,
                  "File for the tiles that are faster, for --tuning and MoeTuning::load()")
      ->option_text("FILE");
  command.add_flag("--force", arguments.is_forced, "Replace FILE")->option_text(" ");
  add_checked_device(command, arguments.device);
  add_threads(command, arguments.num_threads);
  add_min_time(command, arguments.min_seconds);
  add_output(command, arguments.output, CsvSupport::kNo);
}

}  // namespace narrowfloat::cli
