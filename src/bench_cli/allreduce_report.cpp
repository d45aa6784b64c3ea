// A row's time is that of its slowest rank. Differences are to the plain all-reduce of the same
// shape, which is measured in the same run: what the epilogue costs, and what moving its bytes
// costs.
#include "bench_cli/allreduce_report.h"

#include <algorithm>
#include <optional>

#include <fmt/format.h>

#include "narrowfloat/runtime.h"

namespace narrowfloat::cli {
namespace {

std::string_view place_name(RankPlace place) {
  switch (place) {
    case RankPlace::kThreads:
      return "threads";
    case RankPlace::kProcesses:
      return "processes";
    case RankPlace::kVirtual:
      return "virtual";
    case RankPlace::kGpus:
      return "gpus";
  }
  return "";
}

std::string_view element_name(DType element) {
  if (element == DType::kF32) return "f32";
  return element == DType::kF16 ? "f16" : "bf16";
}

// A row with what is computed from it and from the plain row of its shape.
struct ReportRow {
  const AllReduceProblem& problem;
  const RowResult& result;
  const RankResult& slowest;
  const RankResult* plain = nullptr;
  RankTraffic traffic;  // One rank's.
  int sharing = 1;      // Ranks that share the memory that is measured.

  [[nodiscard]] double us() const { return slowest.time.median_us; }
  [[nodiscard]] bool has_memory_only() const { return slowest.memory_only_us > 0; }
  [[nodiscard]] std::optional<double> minus_plain_us() const {
    if (plain == nullptr || !result.is_measured()) return {};
    return us() - plain->time.median_us;
  }
  [[nodiscard]] std::optional<double> memory_only_us() const {
    if (!has_memory_only()) return {};
    return slowest.memory_only_us;
  }
  [[nodiscard]] std::optional<double> memory_only_minus_plain_us() const {
    if (plain == nullptr || !has_memory_only()) return {};
    return slowest.memory_only_us - plain->memory_only_us;
  }
  [[nodiscard]] std::optional<double> over_memory_only_percent() const {
    if (!has_memory_only()) return {};
    return 100 * (us() / slowest.memory_only_us - 1);
  }
  [[nodiscard]] double message_gb_per_s() const {
    return billions_per_second(static_cast<double>(message_bytes(problem)), us() * 1e-6);
  }
  [[nodiscard]] double gb_per_s() const {
    return billions_per_second(static_cast<double>(traffic.total()) * sharing, us() * 1e-6);
  }
  [[nodiscard]] bool has_layout() const { return has_layouts(quantization_of(problem)); }
};

// The measured plain row of the same shape, by the same algorithm.
const RankResult* plain_of(const AllReduceProblem& problem, const std::vector<AllReduceRow>& rows,
                           const MeasuredRows& measured) {
  if (problem.pattern == AllReducePattern::kAllReduce) return nullptr;
  for (size_t i = 0; i < rows.size(); ++i) {
    const AllReduceProblem& plain = rows[i].problem;
    const bool is_beside = plain.pattern == AllReducePattern::kAllReduce &&
                           plain.tokens == problem.tokens && plain.hidden == problem.hidden &&
                           plain.algorithm == problem.algorithm;
    if (is_beside && measured.rows[i].is_measured()) return &measured.rows[i].slowest();
  }
  return nullptr;
}

std::vector<ReportRow> report_rows(const AllReduceArguments& arguments,
                                   const std::vector<AllReduceRow>& rows,
                                   const MeasuredRows& measured) {
  const RankSetup& setup = arguments.setup;
  std::vector<ReportRow> report;
  for (size_t i = 0; i < rows.size(); ++i) {
    const RankResult& slowest = measured.rows[i].slowest();
    if (slowest.status == RankResult::Status::kLeftOut) continue;
    const AllReduceProblem& problem = rows[i].problem;
    report.push_back({.problem = problem,
                      .result = measured.rows[i],
                      .slowest = slowest,
                      .plain = plain_of(problem, rows, measured),
                      .traffic = RankTensors(problem, setup.ranks, 0).traffic(slowest.algorithm),
                      .sharing = setup.place == RankPlace::kVirtual ? setup.ranks : 1});
  }
  return report;
}

std::string result_text(const ReportRow& row) {
  if (!row.result.is_measured()) {
    return row.slowest.error == ErrorKind::kUnsupported ? "unsupported" : "ERROR";
  }
  if (!row.result.is_correct()) return "WRONG";
  return row.result.is_exact() ? "correct" : "inexact";
}

Json optional_json(const std::optional<double>& value) {
  return value ? Json(*value) : Json(nullptr);
}

Json case_json(const ReportRow& row) {
  const AllReduceProblem& problem = row.problem;
  const CallTime& time = row.slowest.time;
  const bool is_measured = row.result.is_measured();
  Json medians = Json::array();
  for (const RankResult& rank : row.result.ranks) medians.push_back(rank.time.median_us);
  const bool is_fp32 = problem.accumulation == AllReduceAccumulation::kFp32;
  return Json{{"pattern", name(problem.pattern)},
              {"quantization", name(quantization_of(problem))},
              {"tokens", problem.tokens},
              {"hidden", problem.hidden},
              {"element", element_name(problem.element)},
              {"layout", row.has_layout() ? Json(name(problem.scale_layout)) : Json(nullptr)},
              {"group", problem.group == 0 ? Json(nullptr) : Json(problem.group)},
              {"accumulate", is_fp32 ? "fp32" : "element"},
              {"asked_for", name(problem.algorithm)},
              {"algorithm", is_measured ? Json(name(row.slowest.algorithm)) : Json(nullptr)},
              {"median_us", time.median_us},
              {"p10_us", time.p10_us},
              {"p90_us", time.p90_us},
              {"calls", time.calls},
              {"replays", time.replays},
              {"rank_median_us", medians},
              {"buffer_sets", row.slowest.buffer_sets},
              {"message_bytes", message_bytes(problem)},
              {"moved_bytes", Json{{"read", row.traffic.read_bytes},
                                   {"write", row.traffic.write_bytes},
                                   {"exchange_read", row.traffic.exchange_read_bytes},
                                   {"exchange_write", row.traffic.exchange_write_bytes}}},
              {"message_gb_per_s", row.message_gb_per_s()},
              {"gb_per_s", row.gb_per_s()},
              {"minus_plain_us", optional_json(row.minus_plain_us())},
              {"memory_only_us", optional_json(row.memory_only_us())},
              {"memory_only_minus_plain_us", optional_json(row.memory_only_minus_plain_us())},
              {"over_memory_only_percent", optional_json(row.over_memory_only_percent())},
              {"exact", is_measured && row.result.is_exact()},
              {"correct", row.result.is_correct()},
              {"message", row.slowest.message}};
}

Json document_of(const AllReduceArguments& arguments, const RunFacts& facts) {
  const RankSetup& setup = arguments.setup;
  Json document = json_document("allreduce");
  document["version"] = version();
  document["commit"] = arguments.commit;
  document["on"] = place_name(setup.place);
  document["ranks"] = setup.ranks;
  document["one_gpu"] = setup.is_one_gpu;
  document["transport"] = name(facts.transport);
  document["machine"] =
      Json{{"name", facts.machine}, {"driver", facts.driver}, {"cuda_runtime", facts.cuda_runtime}};
  document["nccl"] = facts.nccl[0] == 0 ? Json(nullptr) : Json(facts.nccl);
  document["programmatic"] = arguments.measure.is_programmatic;
  document["deadline_ms"] = setup.workspace.deadline.count();
  document["environment"] = environment_settings();
  return document;
}

std::string us_text(double us) { return fmt::format("{:.{}f}", us, us < 100 ? 2 : 1); }

std::string us_text(const std::optional<double>& us) { return us ? us_text(*us) : "-"; }

// A table of text leaves out what nothing was measured for; CSV has all columns.
Table case_table(const std::vector<ReportRow>& rows, bool has_all) {
  using enum Table::Align;
  const bool has_memory_only = has_all || std::ranges::any_of(rows, &ReportRow::has_memory_only);
  std::vector<Table::Column> columns = {{"pattern"},
                                        {"shape"},
                                        {"layout"},
                                        {"algorithm"},
                                        {"us", kRight},
                                        {"p10_p90_us", kRight},
                                        {"minus_plain_us", kRight}};
  const std::vector<Table::Column> memory_only = {{"memory_only_us", kRight},
                                                  {"over_memory_only_percent", kRight},
                                                  {"memory_only_minus_plain_us", kRight}};
  const std::vector<Table::Column> rest = {
      {"message_bytes", kRight}, {"moved_bytes", kRight}, {"gb_per_s", kRight}, {"result"}};
  if (has_memory_only) columns.insert(columns.end(), memory_only.begin(), memory_only.end());
  columns.insert(columns.end(), rest.begin(), rest.end());
  Table table(columns);
  for (const ReportRow& row : rows) {
    const AllReduceProblem& problem = row.problem;
    const CallTime& time = row.slowest.time;
    const bool is_measured = row.result.is_measured();
    const std::optional<double> over = row.over_memory_only_percent();
    std::vector<std::string> cells = {
        std::string(name(problem.pattern)),
        fmt::format("{}x{}", problem.tokens, problem.hidden),
        row.has_layout() ? std::string(name(problem.scale_layout)) : "-",
        std::string(name(is_measured ? row.slowest.algorithm : problem.algorithm)),
        is_measured ? us_text(row.us()) : "-",
        is_measured ? us_text(time.p10_us) + "-" + us_text(time.p90_us) : "-",
        us_text(row.minus_plain_us())};
    if (has_memory_only) {
      cells.push_back(us_text(row.memory_only_us()));
      cells.push_back(over ? format_fixed(*over, 1) : "-");
      cells.push_back(us_text(row.memory_only_minus_plain_us()));
    }
    cells.push_back(std::to_string(message_bytes(problem)));
    cells.push_back(std::to_string(row.traffic.total()));
    cells.push_back(fmt::format("{:.1f}", row.gb_per_s()));
    cells.push_back(result_text(row));
    table.add_row(cells, row.result.is_correct() ? Tone::kPlain : Tone::kBad);
  }
  return table;
}

std::string heading(const AllReduceArguments& arguments, const RunFacts& facts) {
  const RankSetup& setup = arguments.setup;
  std::string text =
      fmt::format("{} ranks ({}, transport {}) on {}", setup.ranks, place_name(setup.place),
                  name(facts.transport), escaped(facts.machine));
  if (facts.nccl[0] != 0) text += fmt::format(", NCCL {}", facts.nccl);
  return text;
}

}  // namespace

void print_rows(const AllReduceArguments& arguments, const std::vector<AllReduceRow>& rows,
                const MeasuredRows& measured) {
  const std::vector<ReportRow> report = report_rows(arguments, rows, measured);
  for (const ReportRow& row : report) {
    if (row.result.is_correct()) continue;
    warn(fmt::format("{} {}x{}: {}", name(row.problem.pattern), row.problem.tokens,
                     row.problem.hidden, escaped(row.slowest.message)));
  }
  switch (arguments.output.data) {
    case DataFormat::kJson: {
      Json document = document_of(arguments, measured.facts);
      document["cases"] = Json::array();
      for (const ReportRow& row : report) document["cases"].push_back(case_json(row));
      return print_json(document);
    }
    case DataFormat::kCsv:
      return write_stdout(case_table(report, true).to_csv());
    case DataFormat::kTable:
      if (arguments.output.is_quiet) return;
      write_stdout(heading(arguments, measured.facts) + "\n\n");
      return write_stdout(case_table(report, false).to_text(is_colored(arguments.output.color)));
  }
}

void print_soak(const AllReduceArguments& arguments, const SoakOutcome& outcome,
                const std::string& verdict) {
  const SoakResult& first = outcome.results.front();
  Json algorithms = Json::object();
  for (size_t i = 0; i < std::size(first.algorithms); ++i) {
    if (first.algorithms[i] == 0) continue;
    algorithms[std::string(name(static_cast<AllReduceAlgorithm>(i)))] = first.algorithms[i];
  }
  if (arguments.output.data == DataFormat::kJson) {
    Json document = document_of(arguments, outcome.facts);
    Json ends = Json::array();
    for (const RankEnd& end : outcome.ends) {
      ends.push_back(Json{{"signal", end.signal}, {"message", end.message}});
    }
    document["soak"] = Json{{"calls", first.calls},
                            {"problems", first.problems},
                            {"algorithms", algorithms},
                            {"seconds", first.seconds},
                            {"kill_rank", arguments.kill_rank},
                            {"ends", ends},
                            {"correct", verdict.empty()},
                            {"message", verdict}};
    return print_json(document);
  }
  if (arguments.output.is_quiet) return;
  std::string text = heading(arguments, outcome.facts) + "\n";
  text += fmt::format("{} calls of {} problems in {} ({}): {}\n", first.calls, first.problems,
                      format_duration(first.seconds), algorithms.dump(),
                      verdict.empty() ? "correct" : "WRONG");
  for (size_t rank = 0; rank < outcome.ends.size(); ++rank) {
    const RankEnd& end = outcome.ends[rank];
    if (end.signal != 0) text += fmt::format("rank {}: ended by signal {}\n", rank, end.signal);
    if (end.has_failed) text += fmt::format("rank {}: {}\n", rank, escaped(end.message));
  }
  write_stdout(text);
}

}  // namespace narrowfloat::cli
