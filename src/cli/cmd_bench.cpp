// narrowfloat bench: the speed of every format on the CPU, beside memcpy of the same bytes in the
// same run; with --device a sweep (bench/sweep.h). A result that differs from the reference
// implementation is exit code 1.
#include <fmt/format.h>

#include "cli/bench/sweep.h"
#include "cli/bench_case.h"
#include "cli/commands.h"
#include "cli/json_output.h"
#include "cli/output.h"
#include "narrowfloat/error.h"

namespace narrowfloat::cli {
namespace {

struct BenchCase {
  BenchProblem problem;
  BenchResult result;
};

// Operations outside, formats inside: what people compare stands together.
std::vector<BenchProblem> problems_of(const BenchArguments& arguments) {
  std::vector<FormatId> formats = arguments.formats;
  if (formats.empty()) {
    for (const FormatInfo& info : all_formats()) formats.push_back(info.id);
  }
  std::vector<BenchProblem> problems;
  for (const std::string_view op : {"quantize", "dequantize"}) {
    if (!arguments.op.empty() && arguments.op != op) continue;
    for (const FormatId format : formats) {
      problems.push_back({.op = op,
                          .format = format,
                          .rows = arguments.rows,
                          .cols = arguments.cols,
                          .dtype = arguments.dtype,
                          .math = arguments.math,
                          .min_seconds = arguments.min_seconds});
    }
  }
  return problems;
}

std::string shape_text(const BenchArguments& arguments) {
  return fmt::format("{}x{}", arguments.rows, arguments.cols);
}

double percent_of_memcpy(const BenchResult& result) {
  const double memcpy_rate = result.memcpy_gb_per_second();
  return memcpy_rate > 0 ? 100 * result.gb_per_second() / memcpy_rate : 0;
}

void print_document(const BenchArguments& arguments, const std::vector<BenchCase>& cases) {
  Json document = json_document("bench");
  document["version"] = version();
  document["cpu"] = cpu_info().model;
  document["threads"] = num_threads();
  document["shape"] = shape_text(arguments);
  document["dtype"] = name(arguments.dtype);
  document["math"] = name(arguments.math);
  document["min_seconds"] = arguments.min_seconds;
  document["environment"] = environment_settings();
  document["cases"] = Json::array();
  for (const auto& [problem, result] : cases) {
    document["cases"].push_back(Json{{"op", problem.op},
                                     {"format", name(problem.format)},
                                     {"implementation", result.implementation},
                                     {"size_bytes", result.size_bytes},
                                     {"runs", result.num_runs},
                                     {"median_seconds", result.median_seconds},
                                     {"gb_per_second", result.gb_per_second()},
                                     {"memcpy_gb_per_second", result.memcpy_gb_per_second()},
                                     {"correct", result.is_correct}});
  }
  print_json(document);
}

// For people and for CSV: the names of the columns carry the units.
Table case_table(const std::vector<BenchCase>& cases) {
  using enum Table::Align;
  Table table({{"op", kLeft},
               {"format", kLeft},
               {"implementation", kLeft},
               {"median_ms", kRight},
               {"gb_per_s", kRight},
               {"memcpy_gb_per_s", kRight},
               {"percent_of_memcpy", kRight},
               {"runs", kRight},
               {"result", kLeft}});
  for (const auto& [problem, result] : cases) {
    table.add_row({std::string(problem.op), std::string(name(problem.format)),
                   result.implementation, fmt::format("{:.3f}", result.median_seconds * 1e3),
                   fmt::format("{:.2f}", result.gb_per_second()),
                   fmt::format("{:.2f}", result.memcpy_gb_per_second()),
                   fmt::format("{:.0f}", percent_of_memcpy(result)),
                   std::to_string(result.num_runs), result.is_correct ? "correct" : "WRONG"},
                  result.is_correct ? Tone::kPlain : Tone::kBad);
  }
  return table;
}

void print_results(const BenchArguments& arguments, const std::vector<BenchCase>& cases) {
  switch (arguments.output.data) {
    case DataFormat::kJson:
      return print_document(arguments, cases);
    case DataFormat::kCsv:
      return write_stdout(case_table(cases).to_csv());
    case DataFormat::kTable:
      if (arguments.output.is_quiet) return;
      write_stdout(
          fmt::format("{} {}, {} mode, {} threads, {}; GB/s count bytes read and written\n",
                      shape_text(arguments), name(arguments.dtype), name(arguments.math),
                      num_threads(), cpu_info().model));
      return write_stdout(case_table(cases).to_text(is_colored(arguments.output.color)));
  }
}

}  // namespace

ExitCode run(const BenchArguments& arguments) {
  if (arguments.sweep.device) return run_sweep(arguments);
  if (!arguments.op.empty() && arguments.op != "quantize" && arguments.op != "dequantize") {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("bench {} needs --device, cpu or cuda:N", arguments.op));
  }
  set_num_threads(arguments.num_threads);
  std::vector<BenchCase> cases;
  bool is_all_correct = true;
  for (const BenchProblem& problem : problems_of(arguments)) {
    if (stderr_is_terminal() && !arguments.output.is_quiet) {
      write_stderr(fmt::format("\r\x1b[K{} {}", problem.op, name(problem.format)));
    }
    cases.push_back({problem, run_bench(problem)});
    is_all_correct = is_all_correct && cases.back().result.is_correct;
  }
  if (stderr_is_terminal()) write_stderr("\r\x1b[K");
  print_results(arguments, cases);
  return is_all_correct ? ExitCode::kDone : ExitCode::kFindings;
}

}  // namespace narrowfloat::cli
