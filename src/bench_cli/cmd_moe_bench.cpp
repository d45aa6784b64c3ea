// narrowfloat-bench moe bench: the time of a layer with the shape of a known model and random
// weights, in one or more modes. Runs take one range of the tokens after the other, again and
// again, so that few tokens do not find their experts in a cache. Rows come in as bf16, so a mode's
// quantization of its input is timed with it; so is the router. A result outside of its tolerance
// is exit code 1.
#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "bench_cli/commands.h"
#include "bench_cli/moe_bench_report.h"
#include "cli_common/command_line.h"
#include "cli_common/moe/layer_options.h"
#include "cli_common/moe/layer_runner.h"
#include "cli_common/output.h"
#include "narrowfloat/moe_tuning.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat::cli {
namespace {

constexpr const char* kMoeBenchExamples = R"(Examples:
  narrowfloat-bench moe bench --shape gpt-oss-20b
  narrowfloat-bench moe bench --shape 2048,768,32,4 --tokens 1,64 --mode all --routing zipf --csv
  narrowfloat-bench moe bench --shape deepseek-v3 --ep 0/16 --mode nvfp4_bf16
  narrowfloat-bench moe bench --shape deepseek-v3 --device cuda --tokens 1,32,1024
)";
// Every stage gets this part of the time of a case.
constexpr double kStageShare = 0.25;

// Microseconds and launches of runs that end with a stage.
struct StageEnd {
  double median_us = 0;
  int64_t launches = 0;
};

// The differences between a stage's end and that of the one before; none is below 0.
std::vector<StageTime> stage_times(const std::function<StageEnd(MoeStage)>& time_until) {
  std::vector<StageTime> stages;
  StageEnd before;
  for (const MoeStage stage : all_moe_stages()) {
    const StageEnd end = time_until(stage);
    stages.push_back({stage, std::max(end.median_us - before.median_us, 0.0),
                      std::max<int64_t>(end.launches - before.launches, 0)});
    before = {std::max(end.median_us, before.median_us), std::max(end.launches, before.launches)};
  }
  return stages;
}

// Means over the timed runs. A replay that warms up comes before them, and runs take the ranges in
// turn.
void add_load(const BenchInputs& inputs, const std::vector<LoadSummary>& loads,
              MoeBenchResult& result) {
  const int64_t runs = result.time.num_calls();
  for (int64_t i = 0; i < runs; ++i) {
    const LoadSummary& load = loads[static_cast<size_t>(result.time.calls + i) % loads.size()];
    result.experts_hit += static_cast<double>(load.num_hit);
    result.local_slots += static_cast<double>(load.num_slots);
    result.largest_load = std::max(result.largest_load, load.largest);
  }
  result.experts_hit /= static_cast<double>(runs);
  result.local_slots /= static_cast<double>(runs);
  result.work = work_of(inputs.layer.config, result.experts_hit, result.local_slots, result.tokens,
                        inputs.routing.has_ids());
}

// The ranges that runs take, and the load of each. The range that is checked comes last: on a GPU
// every replay ends with it.
std::vector<TokenRange> ranges_of(const BenchInputs& inputs, int64_t tokens,
                                  std::vector<LoadSummary>& loads) {
  std::vector<TokenRange> ranges = inputs.ranges(tokens);
  size_t checked = 0;
  for (const TokenRange range : ranges) {
    loads.push_back(inputs.load_of(range));
    if (loads.back().num_slots > 0) checked = loads.size() - 1;
  }
  std::swap(ranges[checked], ranges.back());
  std::swap(loads[checked], loads.back());
  return ranges;
}

// A timed case, and what its check needs.
struct TimedCase {
  MoeBenchResult result;
  RunSample sample;
};

TimedCase time_case(const MoeBenchArguments& arguments, const BenchInputs& inputs, int64_t tokens,
                    const Machine& machine, LayerRunner& runner) {
  std::vector<LoadSummary> loads;
  const std::vector<TokenRange> ranges = ranges_of(inputs, tokens, loads);
  TimedCase timed;
  MoeBenchResult& result = timed.result;
  result.tokens = tokens;
  result.token_tile = runner.token_tile(tokens);
  result.time = runner.time_runs(ranges, arguments.min_seconds);
  add_load(inputs, loads, result);
  if (machine.is_host()) runner.run(ranges.back());
  timed.sample =
      sample_run(inputs.layer.config, runner.output(), runner.ids(), ranges.back().begin);
  result.launches = runner.count_launches(ranges.back());
  if (arguments.has_stages) {
    result.stages = stage_times([&](MoeStage last) {
      const CallTime time = runner.time_runs(ranges, kStageShare * arguments.min_seconds, last);
      return StageEnd{time.median_us, runner.count_launches(ranges.back(), last)};
    });
  }
  return timed;
}

// Returns one result for each number of tokens. All cases are timed before the first check, so that
// a GPU rests between them for as long as --rest says.
std::vector<MoeBenchResult> measure_cases(const MoeBenchArguments& arguments,
                                          const BenchLayer& layer, const MoeTuning& tuning,
                                          Machine& machine) {
  const std::vector<int64_t>& tokens = arguments.tokens;
  const int64_t max_tokens = *std::max_element(tokens.begin(), tokens.end());
  const BenchInputs inputs = bench_inputs(layer, max_tokens);
  LayerRunner runner(machine, RandomWeights(layer.config, layer.has_bias), layer.config);
  const TokenRange all{0, inputs.routing.tokens()};
  runner.take(tuning);
  runner.load(inputs.rows_of(all), inputs.routing.range(all.begin, all.count), max_tokens);
  std::vector<TimedCase> cases;
  cases.reserve(tokens.size());
  for (const int64_t count : tokens) {
    std::this_thread::sleep_for(std::chrono::duration<double>(arguments.rest_seconds));
    cases.push_back(time_case(arguments, inputs, count, machine, runner));
  }
  std::vector<MoeBenchResult> results;
  for (TimedCase& timed : cases) {
    timed.result.check = check_run(inputs, timed.sample);
    results.push_back(std::move(timed.result));
  }
  return results;
}

MachineRates rates_of(Machine& machine) {
  if (!machine.is_host()) return measure_rates(machine);
  MachineRates rates;
  rates.read_gb_per_s = measure_read_rate(machine);
  return rates;
}

void add_reduction_note(const MoeShape& shape, const MoeConfig& config,
                        std::vector<std::string>& notes) {
  const RoutingConfig& routing = config.routing;
  if (routing.experts == shape.routing.experts) return;
  std::string note = fmt::format("{}: {} of {} experts, as many as memory holds", name(config.mode),
                                 routing.experts, shape.routing.experts);
  if (routing.n_group != shape.routing.n_group) note += ", routed without groups";
  notes.push_back(note);
}

std::string gemm_implementation(const MoeConfig& config, Device device) {
  for (const Explanation& stage : explain_moe(config, 1, device)) {
    if (stage.op == "grouped_gemm") return stage.chosen;
  }
  return "";
}

// The layer in every mode. All are made before the first run, so that no mistake shows after
// minutes.
std::vector<MoeConfig> configs_of(const MoeBenchArguments& arguments, const Machine& machine,
                                  MoeBenchReport& report) {
  const MoeShape& shape = report.shape;
  const int64_t max_tokens = *std::max_element(arguments.tokens.begin(), arguments.tokens.end());
  const uint64_t memory = memory_limit(arguments.max_memory_bytes, machine);
  std::vector<MoeConfig> configs;
  for (const MoeMode mode : modes_of(arguments.layer, shape, arguments.device, report.notes)) {
    configs.push_back(layer_config(shape, mode, arguments.layer.shard, max_tokens, memory));
    MoeConfig& config = configs.back();
    config.token_tile = arguments.token_tile;
    config.fast_sums = arguments.fast_sums;
    check_routing(arguments.routing, config.routing, max_tokens, shape.routing.experts);
    add_reduction_note(shape, config, report.notes);
  }
  return configs;
}

MoeBenchReport measure_layers(const MoeBenchArguments& arguments) {
  MoeBenchReport report;
  report.shape = parse_moe_shape(arguments.layer.shape);
  MoeTuning tuning;
  if (!arguments.tuning.empty()) tuning = MoeTuning::load(arguments.tuning);
  const std::unique_ptr<Machine> machine = open_machine(arguments.device);
  const std::vector<MoeConfig> configs = configs_of(arguments, *machine, report);
  report.machine = machine->facts();
  report.is_on_gpu = !machine->is_host();
  report.rates = rates_of(*machine);
  StatusLine status(arguments.output);
  for (const MoeConfig& config : configs) {
    status.show(fmt::format("{} {}", report.shape.name, name(config.mode)));
    const BenchLayer layer{config, report.shape.has_bias, report.shape.routing.experts,
                           arguments.routing};
    report.modes.push_back({config, gemm_implementation(config, arguments.device),
                            measure_cases(arguments, layer, tuning, *machine)});
  }
  return report;
}

bool has_wrong(const MoeBenchReport& report) {
  return std::any_of(report.modes.begin(), report.modes.end(), [](const ModeResults& mode) {
    return std::any_of(mode.cases.begin(), mode.cases.end(), [](const MoeBenchResult& result) {
      return result.check.verdict == Verdict::kWrong;
    });
  });
}

ExitCode run_moe_bench(const MoeBenchArguments& arguments) {
  set_num_threads(arguments.num_threads);
  const MoeBenchReport report = measure_layers(arguments);
  print_report(arguments, report);
  return has_wrong(report) ? ExitCode::kFindings : ExitCode::kDone;
}

}  // namespace

void add_moe_bench(const Commands& commands) {
  CLI::App& command =
      add_command(commands, "bench",
                  "Time a layer with random weights in the shape of a model, checking results",
                  kMoeBenchExamples);
  MoeBenchArguments& arguments = arguments_of(command, commands, run_moe_bench);
  add_layer(command, arguments.layer);
  add_tokens(command, arguments.tokens, "1,8,64,512");
  add_routing(command, arguments.routing);
  add_memory(command, arguments.max_memory_bytes, "run with fewer experts");
  add_token_tile(command, arguments.token_tile);
  add_fast_sums(command, arguments.fast_sums);
  add_tuning(command, arguments.tuning);
  command.add_flag("--stages", arguments.has_stages, "Time the stages of the layer, too")
      ->option_text(" ");
  add_commit(command, arguments.commit);
  add_checked_device(command, arguments.device);
  add_threads(command, arguments.num_threads);
  add_min_time(command, arguments.min_seconds);
  command.add_option("--rest", arguments.rest_seconds, "Rest before each case")
      ->option_text("S")
      ->check(number_in(0, 3600));
  add_output(command, arguments.output, CsvSupport::kYes);
}

}  // namespace narrowfloat::cli
