// narrowfloat moe gemm: the time of one grouped GEMM of random weights and rows. A result outside
// of its tolerance is exit code 1.
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "cli/bench/machine_json.h"
#include "cli/commands.h"
#include "cli/json_output.h"
#include "cli/moe/gemm_case.h"
#include "cli/output.h"
#include "cli/timing.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat::cli {
namespace {

struct GemmReport {
  MachineFacts facts;
  MachineRates rates;
  std::vector<std::pair<GemmProblem, GemmResult>> cases;
};

bool is_correct(const GemmResult& result) { return result.check.verdict == Verdict::kCorrect; }

double rate_of(double amount, const GemmResult& result) {
  return billions_per_second(amount, result.time.median_us * 1e-6);
}

Json case_json(const GemmProblem& problem, const GemmResult& result) {
  const CallTime& time = result.time;
  const Distance& error = result.check.error;
  return Json{
      {"mode", name(problem.mode)},
      {"implementation", result.implementation},
      {"n", problem.shape.n},
      {"k", problem.shape.k},
      {"groups", problem.shape.groups},
      {"rows", problem.rows},
      {"token_tile", result.token_tile},
      {"median_us", time.median_us},
      {"p10_us", time.p10_us},
      {"p90_us", time.p90_us},
      {"calls", time.calls},
      {"replays", time.replays},
      {"weight_bytes", result.weight_bytes},
      {"flops", result.flops},
      {"weight_gb_per_second", rate_of(result.weight_bytes, result)},
      {"gflop_per_second", rate_of(result.flops, result)},
      {"checked_rows", result.check.tokens},
      {"error_to_fp64", Json{{"rel", json_number(error.rel)}, {"row", json_number(error.row)}}},
      {"correct", is_correct(result)}};
}

void print_document(const MoeGemmArguments& arguments, const GemmReport& report) {
  Json document = json_document("moe gemm");
  document["version"] = version();
  document["commit"] = arguments.commit;
  document["cpu"] = cpu_info().model;
  document["threads"] = num_threads();
  document["device"] = to_string(arguments.device);
  if (arguments.device.type != DeviceType::kCpu) {
    document["gpu"] = machine_json(report.facts, arguments.device);
    document["rates"] = rates_json(report.rates);
  }
  document["environment"] = environment_settings();
  document["min_seconds"] = arguments.min_seconds;
  document["cases"] = Json::array();
  for (const auto& [problem, result] : report.cases) {
    document["cases"].push_back(case_json(problem, result));
  }
  print_json(document);
}

// For people and for CSV: the names of the columns carry the units.
Table case_table(const GemmReport& report) {
  using enum Table::Align;
  Table table({{"mode", kLeft},
               {"implementation", kLeft},
               {"n", kRight},
               {"k", kRight},
               {"groups", kRight},
               {"rows", kRight},
               {"tile", kRight},
               {"median_us", kRight},
               {"p10_p90_us", kRight},
               {"weights_gb_per_s", kRight},
               {"gflop_per_s", kRight},
               {"row_fp64", kRight},
               {"result", kLeft}});
  for (const auto& [problem, result] : report.cases) {
    table.add_row(
        {std::string(name(problem.mode)), result.implementation, std::to_string(problem.shape.n),
         std::to_string(problem.shape.k), std::to_string(problem.shape.groups),
         std::to_string(problem.rows), std::to_string(result.token_tile),
         fmt::format("{:.1f}", result.time.median_us),
         fmt::format("{:.1f}-{:.1f}", result.time.p10_us, result.time.p90_us),
         fmt::format("{:.1f}", rate_of(result.weight_bytes, result)),
         fmt::format("{:.1f}", rate_of(result.flops, result)),
         fmt::format("{:.2e}", result.check.error.row), is_correct(result) ? "correct" : "WRONG"},
        is_correct(result) ? Tone::kPlain : Tone::kBad);
  }
  return table;
}

void print_report(const MoeGemmArguments& arguments, const GemmReport& report) {
  switch (arguments.output.data) {
    case DataFormat::kJson:
      return print_document(arguments, report);
    case DataFormat::kCsv:
      return write_stdout(case_table(report).to_csv());
    case DataFormat::kTable:
      if (arguments.output.is_quiet) return;
      write_stdout(fmt::format("{}: {}\n\n", to_string(arguments.device), report.facts.name));
      return write_stdout(case_table(report).to_text(is_colored(arguments.output.color)));
  }
}

}  // namespace

ExitCode run(const MoeGemmArguments& arguments) {
  constexpr int kRateReplays = 5;
  set_num_threads(arguments.num_threads);
  const bool is_on_cpu = arguments.device.type == DeviceType::kCpu;
  const std::unique_ptr<Machine> machine =
      is_on_cpu ? open_host() : open_gpu(arguments.device.index);
  GemmReport report;
  report.facts = machine->facts();
  if (!is_on_cpu) report.rates = measure_rates(*machine, kRateReplays);
  ExitCode code = ExitCode::kDone;
  for (const int64_t rows : arguments.rows) {
    const GemmProblem problem{.shape = {arguments.n, arguments.k, arguments.groups},
                              .mode = arguments.mode,
                              .rows = rows,
                              .token_tile = arguments.token_tile,
                              .min_seconds = arguments.min_seconds};
    report.cases.emplace_back(problem, measure_gemm(*machine, problem));
    if (!is_correct(report.cases.back().second)) code = ExitCode::kFindings;
  }
  print_report(arguments, report);
  return code;
}

}  // namespace narrowfloat::cli
