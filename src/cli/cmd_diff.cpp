// narrowfloat diff A B: what the values of B lost against those of A, worst tensor first. Exit code
// 1 where a value differs, so that scripts can ask "same model?" without reading the output.
#include <algorithm>
#include <tuple>

#include <fmt/format.h>

#include "cli/checkpoint_report.h"
#include "cli/commands.h"
#include "cli_common/command_line.h"
#include "cli_common/output.h"
#include "narrowfloat/checkpoint.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat::cli {
namespace {

constexpr const char* kDiffExamples = R"(Examples:
  narrowfloat diff model-bf16 model-nvfp4            what quantization cost, worst tensor first
  narrowfloat diff a.safetensors b.safetensors -q    only the exit code: 0 same values, 1 different
)";

struct DiffArguments {
  OutputArguments output;
  int num_threads = 0;
  std::string a;
  std::string b;
};

constexpr std::string_view kIdentical = "identical";
constexpr std::string_view kSameValues = "same values";
constexpr std::string_view kDifferent = "different";

// Rows of the table without -v: the worst ones are what people look for.
constexpr int64_t kMaxRows = 20;

bool is_equal(const TensorDiff& diff) {
  return diff.status == kIdentical || diff.status == kSameValues;
}

// Tensors that cannot be compared first, then by error, then by name; equal ones last.
void sort_worst_first(std::vector<TensorDiff>& diffs) {
  const auto key = [](const TensorDiff& diff) {
    const int rank = is_equal(diff) ? 2 : diff.status == kDifferent ? 1 : 0;
    return std::tuple(rank, -diff.figures.relative_error, std::string_view(diff.name));
  };
  std::sort(diffs.begin(), diffs.end(),
            [&](const TensorDiff& a, const TensorDiff& b) { return key(a) < key(b); });
}

void print_document(const DiffArguments& arguments, const CheckpointDiff& diff) {
  Json document = json_document("diff");
  document["a"] = arguments.a;
  document["b"] = arguments.b;
  document["equal"] = diff.equal;
  document["total"] = figures_json(diff.total);
  document["warnings"] = diff.warnings;
  document["tensors"] = Json::array();
  for (const TensorDiff& tensor : diff.tensors) {
    document["tensors"].push_back(Json{{"name", tensor.name},
                                       {"status", tensor.status},
                                       {"detail", tensor.detail},
                                       {"figures", figures_json(tensor.figures)}});
  }
  print_json(document);
}

// One cell for each column of figure_table() up to the name. Few digits: the exact numbers are in
// --json and --csv.
std::vector<std::string> figure_cells(const ErrorFigures& figures) {
  return {fmt::format("{:.3e}", figures.mse),
          fmt::format("{:.5f}", figures.relative_error),
          format_fixed(figures.sqnr_db, 2),
          fmt::format("{:.6f}", figures.cosine),
          fmt::format("{:.6f}", figures.norm_ratio),
          fmt::format("{:.3e}", figures.max_abs),
          figures.clipped_percent ? fmt::format("{:.2f}", *figures.clipped_percent) : "-",
          fmt::format("{:.2f}", figures.flushed_percent)};
}

Table figure_table() {
  using enum Table::Align;
  return Table({{"MSE", kRight},
                {"rel error", kRight},
                {"SQNR dB", kRight},
                {"cosine", kRight},
                {"norm ratio", kRight},
                {"max abs", kRight},
                {"clipped %", kRight},
                {"flushed %", kRight},
                {"tensor", kLeft},
                {"status", kLeft}});
}

std::string status_text(const TensorDiff& diff) {
  return diff.detail.empty() ? diff.status : diff.status + ": " + escaped(diff.detail);
}

void add_tensor(Table& table, const TensorDiff& diff) {
  // Figures of tensors that were not compared would look like results.
  const bool is_compared = is_equal(diff) || diff.status == kDifferent;
  std::vector<std::string> cells = is_compared
                                       ? figure_cells(diff.figures)
                                       : std::vector<std::string>(figure_cells({}).size(), "-");
  cells.push_back(escaped(diff.name));
  cells.push_back(status_text(diff));
  table.add_row(std::move(cells), is_compared ? Tone::kPlain : Tone::kBad);
}

// Elements that the figures leave out; empty if there are none.
std::string nonfinite_text(const CheckpointDiff& diff) {
  int64_t elements = 0;
  std::vector<const TensorDiff*> tensors;
  for (const TensorDiff& tensor : diff.tensors) {
    if (tensor.figures.nonfinite == 0) continue;
    elements += tensor.figures.nonfinite;
    tensors.push_back(&tensor);
  }
  if (tensors.empty()) return "";
  const TensorDiff& first = *tensors.front();
  return fmt::format(
      "left out: {} elements that are NaN or infinite in A or B, {} of them in {}{}\n", elements,
      first.figures.nonfinite, escaped(first.name),
      tensors.size() > 1 ? fmt::format(", the rest in {} more", tensors.size() - 1) : "");
}

// The worst tensors, the figures over all that differ, and a verdict.
void print_table(const CheckpointDiff& diff, const OutputArguments& output) {
  const int64_t num_different = std::count_if(diff.tensors.begin(), diff.tensors.end(),
                                              [](const auto& tensor) { return !is_equal(tensor); });
  const auto num_tensors = static_cast<int64_t>(diff.tensors.size());
  const int64_t num_rows = output.is_verbose ? num_tensors : std::min(num_different, kMaxRows);
  Table table = figure_table();
  for (int64_t i = 0; i < num_rows; ++i) add_tensor(table, diff.tensors[static_cast<size_t>(i)]);
  const bool colored = is_colored(output.color);
  std::string text;
  if (!table.is_empty()) {
    std::vector<std::string> total = figure_cells(diff.total);
    total.insert(total.end(), {"all tensors that differ", ""});
    table.add_row(std::move(total), Tone::kHeading);
    text = table.to_text(colored);
    if (num_rows < num_different) {
      text += fmt::format("... and {} tensors with smaller errors (-v shows all)\n",
                          num_different - num_rows);
    }
    text += '\n';
  }
  text += nonfinite_text(diff);
  text += fmt::format("{}: {} of {} tensors have other values\n",
                      diff.equal ? paint("same values", Tone::kGood, colored)
                                 : paint("different", Tone::kBad, colored),
                      num_different, num_tensors);
  write_stdout(text);
}

// All tensors, numbers with all their digits, names of columns as the fields of --json.
void print_csv(const CheckpointDiff& diff) {
  Table table({{"tensor"},
               {"status"},
               {"elements"},
               {"mse"},
               {"relative_error"},
               {"sqnr_db"},
               {"cosine"},
               {"norm_ratio"},
               {"max_abs"},
               {"max_abs_index"},
               {"clipped_percent"},
               {"flushed_percent"},
               {"nonfinite"}});
  const auto number = [](double value) { return fmt::format("{}", value); };
  for (const TensorDiff& tensor : diff.tensors) {
    const ErrorFigures& figures = tensor.figures;
    table.add_row({escaped(tensor.name), tensor.status, std::to_string(figures.elements),
                   number(figures.mse), number(figures.relative_error), number(figures.sqnr_db),
                   number(figures.cosine), number(figures.norm_ratio), number(figures.max_abs),
                   std::to_string(figures.max_abs_index),
                   figures.clipped_percent ? number(*figures.clipped_percent) : "",
                   number(figures.flushed_percent), std::to_string(figures.nonfinite)});
  }
  write_stdout(table.to_csv());
}

ExitCode run_diff(const DiffArguments& arguments) {
  set_num_threads(arguments.num_threads);
  CheckpointDiff diff = diff_checkpoints(arguments.a, arguments.b);
  sort_worst_first(diff.tensors);
  if (!arguments.output.is_quiet) {
    for (const std::string& warning : diff.warnings) warn(warning);
  }
  if (arguments.output.data == DataFormat::kJson) {
    print_document(arguments, diff);
  } else if (arguments.output.data == DataFormat::kCsv) {
    print_csv(diff);
  } else if (!arguments.output.is_quiet) {
    print_table(diff, arguments.output);
  }
  return diff.equal ? ExitCode::kDone : ExitCode::kFindings;
}

}  // namespace

void add_diff(const Commands& commands) {
  CLI::App& command = add_command(
      commands, "diff",
      "Compare the values of two checkpoints, quantized or not; A is the reference", kDiffExamples);
  DiffArguments& arguments = arguments_of(command, commands, run_diff);
  add_path(command, "A", arguments.a, "The reference: a file or a directory");
  add_path(command, "B", arguments.b, "What to compare with it");
  add_threads(command, arguments.num_threads);
  add_output(command, arguments.output, CsvSupport::kYes);
}

}  // namespace narrowfloat::cli
