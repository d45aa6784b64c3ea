// narrowfloat moe bench: the time of a layer with the shape of a known model and random weights, in
// one or more modes. A result outside of its tolerance is exit code 1.
#include <algorithm>

#include <fmt/format.h>

#include "cli/bench/measure.h"
#include "cli/commands.h"
#include "cli/memory_read.h"
#include "cli/moe/bench_report.h"
#include "cli/moe/bench_routing.h"
#include "cli/moe/gpu_layer.h"
#include "cli/output.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat::cli {
namespace {

constexpr double kReadTestSeconds = 0.2;
constexpr int kRateReplays = 5;

MachineRates rates_of(const MoeBenchArguments& arguments, Machine* gpu) {
  if (gpu != nullptr) return measure_rates(*gpu, kRateReplays);
  MachineRates rates;
  rates.read_gb_per_s = read_gb_per_second(std::min(arguments.min_seconds, kReadTestSeconds));
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

// The layer in every mode. All of them before the first run: no mistake shows after minutes.
std::vector<MoeConfig> configs_of(const MoeBenchArguments& arguments, const Machine* gpu,
                                  MoeBenchReport& report) {
  const MoeShape& shape = report.shape;
  const int64_t max_tokens = *std::max_element(arguments.tokens.begin(), arguments.tokens.end());
  const ExpertShard shard{arguments.rank, arguments.num_ranks};
  std::vector<MoeConfig> configs;
  for (const MoeMode mode :
       bench_modes(shape, arguments.modes, arguments.is_all_modes, report.notes)) {
    configs.push_back(bench_config(shape, mode, shard, max_tokens,
                                   memory_limit(arguments.max_memory_bytes, gpu)));
    MoeConfig& config = configs.back();
    config.token_tile = arguments.token_tile;
    check_routing(arguments.routing, config.routing, max_tokens, shape.routing.experts);
    add_reduction_note(shape, config, report.notes);
  }
  return configs;
}

MoeBenchReport measure(const MoeBenchArguments& arguments) {
  MoeBenchReport report;
  report.shape = parse_moe_shape(arguments.shape);
  if (!arguments.tuning.empty()) report.tuning = MoeTuning::load(arguments.tuning);
  const std::unique_ptr<Machine> gpu = open_layer_machine(arguments.device);
  const std::vector<MoeConfig> configs = configs_of(arguments, gpu.get(), report);
  report.rates = rates_of(arguments, gpu.get());
  if (gpu != nullptr) report.gpu = gpu->facts();
  report.machine = gpu == nullptr ? cpu_info().model : gpu->facts().name;
  const bool has_progress = stderr_is_terminal() && !arguments.output.is_quiet;
  for (const MoeConfig& config : configs) {
    if (has_progress)
      write_stderr(fmt::format("\r\x1b[K{} {}", report.shape.name, name(config.mode)));
    const MoeBenchProblem problem{config,
                                  report.shape.has_bias,
                                  report.shape.routing.experts,
                                  arguments.routing,
                                  arguments.min_seconds,
                                  arguments.has_stages,
                                  gpu.get(),
                                  report.tuning};
    report.modes.push_back({config, gemm_implementation(config, arguments.device),
                            run_moe_bench(problem, arguments.tokens)});
    for (const MoeBenchResult& result : report.modes.back().cases) {
      report.has_wrong = report.has_wrong || result.check.verdict == Verdict::kWrong;
    }
  }
  if (has_progress) write_stderr("\r\x1b[K");
  return report;
}

}  // namespace

ExitCode run(const MoeBenchArguments& arguments) {
  set_num_threads(arguments.num_threads);
  const MoeBenchReport report = measure(arguments);
  print_report(arguments, report);
  return report.has_wrong ? ExitCode::kFindings : ExitCode::kDone;
}

}  // namespace narrowfloat::cli
