// narrowfloat moe bench: the time of a layer with the shape of a known model and random weights, in
// one or more modes. A result outside of its tolerance is exit code 1.
#include <algorithm>

#include <fmt/format.h>

#include "cli/bench/measure.h"
#include "cli/commands.h"
#include "cli/json_output.h"
#include "cli/memory_read.h"
#include "cli/moe/bench_case.h"
#include "cli/moe/bench_routing.h"
#include "cli/moe/gpu_layer.h"
#include "cli/output.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat::cli {
namespace {

// Of the memory that is available; the rest is the system's and ours.
constexpr double kMemoryShare = 0.6;
constexpr double kReadTestSeconds = 0.2;
constexpr int kRateReplays = 5;

struct ModeResults {
  MoeConfig config;
  std::string implementation;  // Of the first GEMM.
  std::vector<MoeBenchResult> cases;
};

struct Report {
  MoeShape shape;
  std::string machine;
  double read_rate = 0;
  std::vector<ModeResults> modes;
  std::vector<std::string> notes;
  bool has_wrong = false;
};

// In the order of the table, each once. A named mode that cannot have the shape stays: an error
// will say why.
std::vector<MoeMode> modes_of(const MoeBenchArguments& arguments, const MoeShape& shape,
                              std::vector<std::string>& notes) {
  const std::vector<MoeMode>& named = arguments.modes;
  if (named.empty() && !arguments.is_all_modes) return {shape.mode};
  std::vector<MoeMode> modes;
  for (const MoeModeInfo& info : all_moe_modes()) {
    const bool is_named = std::find(named.begin(), named.end(), info.id) != named.end();
    const bool fits = shape.hidden % info.multiple == 0 && shape.inter % info.multiple == 0;
    if (is_named || (arguments.is_all_modes && fits)) {
      modes.push_back(info.id);
    } else if (arguments.is_all_modes) {
      notes.push_back(
          fmt::format("{}: left out, hidden and intermediate size must be multiples "
                      "of {}",
                      info.name, info.multiple));
    }
  }
  return modes;
}

// A layer on a GPU has its weights on the host as well, where results are checked.
uint64_t memory_limit(const MoeBenchArguments& arguments, const Machine* gpu) {
  if (arguments.max_memory_bytes > 0) return arguments.max_memory_bytes;
  uint64_t available = available_memory_bytes();
  if (gpu != nullptr) available = std::min(available, gpu->facts().memory_bytes);
  return static_cast<uint64_t>(static_cast<double>(available) * kMemoryShare);
}

// Bytes of weights against the rate at which memory is read.
double read_rate_of(const MoeBenchArguments& arguments, Machine* gpu) {
  if (gpu != nullptr) return measure_rates(*gpu, kRateReplays).read_gb_per_s;
  return read_gb_per_second(std::min(arguments.min_seconds, kReadTestSeconds));
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
                                  Report& report) {
  const MoeShape& shape = report.shape;
  const int64_t max_tokens = *std::max_element(arguments.tokens.begin(), arguments.tokens.end());
  const ExpertShard shard{arguments.rank, arguments.num_ranks};
  std::vector<MoeConfig> configs;
  for (const MoeMode mode : modes_of(arguments, shape, report.notes)) {
    configs.push_back(bench_config(shape, mode, shard, max_tokens, memory_limit(arguments, gpu)));
    const MoeConfig& config = configs.back();
    check_routing(arguments.routing, config.routing, max_tokens, shape.routing.experts);
    add_reduction_note(shape, config, report.notes);
  }
  return configs;
}

Report measure(const MoeBenchArguments& arguments) {
  Report report;
  report.shape = parse_moe_shape(arguments.shape);
  const std::unique_ptr<Machine> gpu = open_layer_machine(arguments.device);
  const std::vector<MoeConfig> configs = configs_of(arguments, gpu.get(), report);
  report.read_rate = read_rate_of(arguments, gpu.get());
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
                                  gpu.get()};
    report.modes.push_back({config, gemm_implementation(config, arguments.device),
                            run_moe_bench(problem, arguments.tokens)});
    for (const MoeBenchResult& result : report.modes.back().cases) {
      report.has_wrong = report.has_wrong || result.verdict == Verdict::kWrong;
    }
  }
  if (has_progress) write_stderr("\r\x1b[K");
  return report;
}

bool is_checked(const MoeBenchResult& result) { return result.checked_tokens > 0; }

std::string verdict_text(Verdict verdict) {
  switch (verdict) {
    case Verdict::kCorrect:
      return "correct";
    case Verdict::kWrong:
      return "WRONG";
    case Verdict::kNotChecked:
      return "not checked";
  }
  return "";
}

Json verdict_json(Verdict verdict) {
  return verdict == Verdict::kNotChecked ? Json(nullptr) : Json(verdict == Verdict::kCorrect);
}

Json error_json(const MoeBenchResult& result) {
  if (!is_checked(result)) return nullptr;
  return Json{{"rel", json_number(result.error.rel)}, {"row", json_number(result.error.row)}};
}

std::string error_text(const MoeBenchResult& result, double error) {
  return is_checked(result) ? fmt::format("{:.2e}", error) : "-";
}

Json case_json(const ModeResults& mode, const MoeBenchResult& result, double read_rate) {
  const MoeConfig& config = mode.config;
  const double mean = result.timing.mean_seconds();
  return Json{{"mode", name(config.mode)},
              {"implementation", mode.implementation},
              {"tokens", result.tokens},
              {"experts", config.routing.experts},
              {"local_experts", config.local_experts},
              {"expert_offset", config.expert_offset},
              {"experts_hit", result.experts_hit},
              {"local_slots", result.local_slots},
              {"largest_load", result.largest_load},
              {"runs", result.timing.num_runs},
              {"total_seconds", result.timing.total_seconds},
              {"median_seconds", result.timing.median_seconds},
              {"lower_quartile_seconds", result.timing.lower_quartile_seconds},
              {"upper_quartile_seconds", result.timing.upper_quartile_seconds},
              {"weight_bytes", result.work.weight_bytes},
              {"bytes", result.work.weight_bytes + result.work.other_bytes},
              {"flops", result.work.flops},
              {"weight_gb_per_second", billions_per_second(result.work.weight_bytes, mean)},
              {"read_gb_per_second", read_rate},
              {"gflop_per_second", billions_per_second(result.work.flops, mean)},
              {"checked_tokens", result.checked_tokens},
              {"error_to_fp64", error_json(result)},
              {"correct", verdict_json(result.verdict)}};
}

void print_document(const MoeBenchArguments& arguments, const Report& report) {
  const MoeShape& shape = report.shape;
  Json document = json_document("moe bench");
  document["version"] = version();
  document["cpu"] = cpu_info().model;
  document["threads"] = num_threads();
  document["device"] = to_string(arguments.device);
  document["machine"] = report.machine;
  document["environment"] = environment_settings();
  document["shape"] = shape.name;
  document["hidden"] = shape.hidden;
  document["inter"] = shape.inter;
  document["experts"] = shape.routing.experts;
  document["top_k"] = shape.routing.top_k;
  document["routing_method"] = name(shape.routing.method);
  document["activation"] = name(shape.activation.kind);
  document["gate_order"] = name(shape.gate_order);
  document["bias"] = shape.has_bias;
  document["routing"] = arguments.routing;
  document["rank"] = arguments.rank;
  document["ranks"] = arguments.num_ranks;
  document["min_seconds"] = arguments.min_seconds;
  document["notes"] = report.notes;
  document["cases"] = Json::array();
  for (const ModeResults& mode : report.modes) {
    for (const MoeBenchResult& result : mode.cases) {
      document["cases"].push_back(case_json(mode, result, report.read_rate));
    }
  }
  print_json(document);
}

// For people and for CSV: the names of the columns carry the units.
Table case_table(const Report& report) {
  using enum Table::Align;
  Table table({{"mode", kLeft},
               {"implementation", kLeft},
               {"tokens", kRight},
               {"experts", kRight},
               {"local_experts", kRight},
               {"hit", kRight},
               {"slots", kRight},
               {"median_ms", kRight},
               {"spread_percent", kRight},
               {"weights_gb_per_s", kRight},
               {"percent_of_read", kRight},
               {"gflop_per_s", kRight},
               {"rel_fp64", kRight},
               {"row_fp64", kRight},
               {"result", kLeft}});
  for (const auto& [config, implementation, cases] : report.modes) {
    for (const MoeBenchResult& result : cases) {
      const double mean = result.timing.mean_seconds();
      const double rate = billions_per_second(result.work.weight_bytes, mean);
      const double share = report.read_rate > 0 ? 100 * rate / report.read_rate : 0;
      table.add_row(
          {std::string(name(config.mode)), implementation, std::to_string(result.tokens),
           std::to_string(config.routing.experts), std::to_string(config.local_experts),
           fmt::format("{:.4g}", result.experts_hit), fmt::format("{:.6g}", result.local_slots),
           fmt::format("{:.3f}", result.timing.median_seconds * 1e3),
           fmt::format("{:.0f}", result.timing.spread_percent()), fmt::format("{:.2f}", rate),
           fmt::format("{:.0f}", share),
           fmt::format("{:.2f}", billions_per_second(result.work.flops, mean)),
           error_text(result, result.error.rel), error_text(result, result.error.row),
           verdict_text(result.verdict)},
          result.verdict == Verdict::kWrong ? Tone::kBad : Tone::kPlain);
    }
  }
  return table;
}

void print_table(const MoeBenchArguments& arguments, const Report& report) {
  const MoeShape& shape = report.shape;
  std::string text =
      fmt::format("{}: hidden {}, intermediate {}, {} experts, top {}, {}, {}{}; routing {}\n",
                  shape.name, shape.hidden, shape.inter, shape.routing.experts, shape.routing.top_k,
                  name(shape.routing.method), name(shape.activation.kind),
                  shape.has_bias ? ", bias" : "", escaped(arguments.routing));
  if (arguments.num_ranks > 1) {
    text += fmt::format("rank {} of {}\n", arguments.rank, arguments.num_ranks);
  }
  for (const std::string& note : report.notes) text += note + "\n";
  const std::string where = arguments.device.type == DeviceType::kCpu
                                ? fmt::format("{} threads", num_threads())
                                : to_string(arguments.device);
  text += fmt::format("{}, {}, memory is read at {:.2f} GB/s\n\n", where, report.machine,
                      report.read_rate);
  write_stdout(text + case_table(report).to_text(is_colored(arguments.output.color)));
}

}  // namespace

ExitCode run(const MoeBenchArguments& arguments) {
  set_num_threads(arguments.num_threads);
  const Report report = measure(arguments);
  if (arguments.output.data == DataFormat::kJson) {
    print_document(arguments, report);
  } else if (arguments.output.data == DataFormat::kCsv) {
    // Not a column: CSV files of several runs are put together.
    if (!arguments.output.is_quiet) {
      for (const std::string& note : report.notes) warn(note);
    }
    write_stdout(case_table(report).to_csv());
  } else if (!arguments.output.is_quiet) {
    print_table(arguments, report);
  }
  return report.has_wrong ? ExitCode::kFindings : ExitCode::kDone;
}

}  // namespace narrowfloat::cli
