// narrowfloat diff A B: what the values of B lost against those of A, worst tensor first. Exit code
// 1 where a value differs, so that scripts can ask "same model?" without reading the output.
#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <optional>
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
  narrowfloat diff ours theirs --original model-bf16 which of the two is nearer to the original
)";

struct DiffArguments {
  OutputArguments output;
  int num_threads = 0;
  std::string a;
  std::string b;
  DiffCheckpointsOptions options;
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

Json stored_json(const TensorDiff& tensor) {
  if (!tensor.stored) return nullptr;
  const StoredDiff& stored = *tensor.stored;
  return Json{{"codes", stored.codes},
              {"different_codes", stored.different_codes},
              {"scales", stored.scales},
              {"different_scales", stored.different_scales},
              {"a_global_scale", json_number(stored.a_global_scale)},
              {"b_global_scale", json_number(stored.b_global_scale)}};
}

Json original_json(const std::optional<OriginalDiff>& original) {
  if (!original) return nullptr;
  return Json{{"misrounded_codes", original->misrounded_codes},
              {"figures", figures_json(original->figures)}};
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
                                       {"figures", figures_json(tensor.figures)},
                                       {"stored", stored_json(tensor)},
                                       {"a_original", original_json(tensor.a_original)},
                                       {"b_original", original_json(tensor.b_original)}});
  }
  print_json(document);
}

// The table's lines have at most so many columns, whatever the names.
constexpr size_t kMaxLine = 100;

// One column of the table: few digits, the exact numbers are in --json and --csv.
struct FigureColumn {
  std::string_view name;
  std::string (*cell)(const TensorDiff& diff);
  bool (*is_known)(const TensorDiff& diff) = nullptr;  // nullptr: for every compared tensor.
};

std::string percent_text(int64_t part, int64_t whole) {
  return fmt::format("{:.2f}", percent_of(static_cast<double>(part), static_cast<double>(whole)));
}

bool is_stored(const TensorDiff& diff) { return diff.stored.has_value(); }
bool has_original(const TensorDiff& diff) { return diff.a_original.has_value(); }

constexpr std::array kValueColumns = {
    FigureColumn{"SQNR dB",
                 [](const TensorDiff& diff) { return format_fixed(diff.figures.sqnr_db, 2); }},
    FigureColumn{"cosine",
                 [](const TensorDiff& diff) { return fmt::format("{:.6f}", diff.figures.cosine); }},
    FigureColumn{
        "norm ratio",
        [](const TensorDiff& diff) { return fmt::format("{:.6f}", diff.figures.norm_ratio); }},
    FigureColumn{
        "max abs",
        [](const TensorDiff& diff) { return fmt::format("{:.2e}", diff.figures.max_abs); }},
    FigureColumn{
        "flushed %",
        [](const TensorDiff& diff) { return fmt::format("{:.2f}", diff.figures.flushed_percent); }},
};
// These columns are for two quantized sides.
constexpr std::array kStoredColumns = {
    FigureColumn{"SQNR dB",
                 [](const TensorDiff& diff) { return format_fixed(diff.figures.sqnr_db, 2); }},
    FigureColumn{"codes %",
                 [](const TensorDiff& diff) {
                   return percent_text(diff.stored->different_codes, diff.stored->codes);
                 },
                 is_stored},
    FigureColumn{"scales %",
                 [](const TensorDiff& diff) {
                   return percent_text(diff.stored->different_scales, diff.stored->scales);
                 },
                 is_stored},
    FigureColumn{"global B/A",
                 [](const TensorDiff& diff) {
                   return fmt::format("{:.5f}",
                                      diff.stored->b_global_scale / diff.stored->a_global_scale);
                 },
                 is_stored},
};
// With --original.
constexpr std::array kOriginalColumns = {
    FigureColumn{
        "A dB",
        [](const TensorDiff& diff) { return format_fixed(diff.a_original->figures.sqnr_db, 2); },
        has_original},
    FigureColumn{"A off %",
                 [](const TensorDiff& diff) {
                   return percent_text(diff.a_original->misrounded_codes,
                                       diff.a_original->figures.elements);
                 },
                 has_original},
    FigureColumn{
        "B dB",
        [](const TensorDiff& diff) { return format_fixed(diff.b_original->figures.sqnr_db, 2); },
        has_original},
    FigureColumn{"B off %",
                 [](const TensorDiff& diff) {
                   return percent_text(diff.b_original->misrounded_codes,
                                       diff.b_original->figures.elements);
                 },
                 has_original},
};

std::vector<FigureColumn> columns_of(const CheckpointDiff& diff) {
  const auto any = [&](auto predicate) {
    return std::any_of(diff.tensors.begin(), diff.tensors.end(), predicate);
  };
  if (!any(is_stored)) return {kValueColumns.begin(), kValueColumns.end()};
  std::vector<FigureColumn> columns(kStoredColumns.begin(), kStoredColumns.end());
  if (any(has_original)) {
    columns.pop_back();  // The line is full.
    columns.insert(columns.end(), kOriginalColumns.begin(), kOriginalColumns.end());
  }
  return columns;
}

// The middle of a name is left out where it is too long: its end tells tensors apart.
std::string shortened_name(const std::string& name, size_t width) {
  const std::string text = escaped(name);
  if (display_width(text) <= width || text.size() != display_width(text)) {
    return shortened(text, width);
  }
  constexpr std::string_view kGap = "...";
  const size_t kept = width - kGap.size();
  return fmt::format("{}{}{}", text.substr(0, kept / 3), kGap,
                     text.substr(text.size() - (kept - kept / 3)));
}

// Figures of tensors that were not compared would look like results.
std::vector<std::string> figure_cells(const std::vector<FigureColumn>& columns,
                                      const TensorDiff& diff) {
  const bool is_compared = is_equal(diff) || diff.status == kDifferent;
  std::vector<std::string> cells;
  for (const FigureColumn& column : columns) {
    const bool is_known = is_compared && (column.is_known == nullptr || column.is_known(diff));
    cells.push_back(is_known ? column.cell(diff) : "-");
  }
  return cells;
}

// A column of statuses says nothing where all are "different", the usual case.
bool has_other_status(const CheckpointDiff& diff, size_t num_rows) {
  return std::any_of(diff.tensors.begin(), diff.tensors.begin() + static_cast<int64_t>(num_rows),
                     [](const TensorDiff& tensor) { return tensor.status != kDifferent; });
}

// The rows, with names as wide as the rest of the line allows, or with -v in full.
std::string table_text(const CheckpointDiff& diff, size_t num_rows, const OutputArguments& output) {
  using enum Table::Align;
  const std::vector<FigureColumn> columns = columns_of(diff);
  const bool has_status = has_other_status(diff, num_rows);
  std::vector<std::vector<std::string>> rows;
  std::vector<Tone> tones;
  for (size_t i = 0; i < num_rows; ++i) {
    const TensorDiff& tensor = diff.tensors[i];
    rows.push_back(figure_cells(columns, tensor));
    tones.push_back(rows.back().front() == "-" ? Tone::kBad : Tone::kPlain);
    if (has_status) rows.back().push_back(tensor.status);
  }
  TensorDiff total;
  total.figures = diff.total;
  rows.push_back(figure_cells(columns, total));
  for (size_t i = 0; i < columns.size(); ++i) {
    if (columns[i].is_known == nullptr) rows.back()[i] = columns[i].cell(total);
  }
  if (has_status) rows.back().emplace_back("");
  tones.push_back(Tone::kHeading);
  size_t width = kMaxLine;
  std::vector<Table::Column> table_columns = {{"tensor", kLeft}};
  for (size_t i = 0; i < columns.size() + (has_status ? 1 : 0); ++i) {
    const std::string name(i < columns.size() ? columns[i].name : std::string_view("status"));
    size_t widest = name.size();
    for (const auto& row : rows) widest = std::max(widest, row[i].size());
    width -= widest + 2;
    table_columns.push_back({name, i < columns.size() ? kRight : kLeft});
  }
  Table table(std::move(table_columns));
  for (size_t i = 0; i < rows.size(); ++i) {
    const std::string name = i < num_rows ? diff.tensors[i].name : "all tensors that differ";
    rows[i].insert(rows[i].begin(),
                   output.is_verbose ? escaped(name) : shortened_name(name, width));
    table.add_row(std::move(rows[i]), tones[i]);
  }
  return table.to_text(is_colored(output.color));
}

// Lists what was compared with what, and how often.
std::string detail_text(const CheckpointDiff& diff) {
  std::map<std::string, int64_t> counts;
  for (const TensorDiff& tensor : diff.tensors) {
    if (!tensor.detail.empty() && tensor.status != kIdentical) {
      ++counts[tensor.status + ": " + escaped(tensor.detail)];
    }
  }
  constexpr size_t kMostDetails = 8;
  std::string text;
  size_t lines = 0;
  for (const auto& [detail, count] : counts) {
    if (++lines > kMostDetails) return text + "...\n";
    text += fmt::format("{} ({} tensor{})\n", detail, count, count == 1 ? "" : "s");
  }
  return text;
}

// Sums up what differs between two quantizations, in all tensors together.
std::string stored_text(const CheckpointDiff& diff) {
  StoredDiff sums;
  double least_ratio = std::numeric_limits<double>::infinity();
  double largest_ratio = 0;
  for (const TensorDiff& tensor : diff.tensors) {
    if (!tensor.stored) continue;
    sums.codes += tensor.stored->codes;
    sums.different_codes += tensor.stored->different_codes;
    sums.scales += tensor.stored->scales;
    sums.different_scales += tensor.stored->different_scales;
    const double ratio = tensor.stored->b_global_scale / tensor.stored->a_global_scale;
    least_ratio = std::min(least_ratio, ratio);
    largest_ratio = std::max(largest_ratio, ratio);
  }
  if (sums.codes == 0) return "";
  return fmt::format(
      "as stored: {} % of the codes differ, {} % of the block scales\n"
      "global scale of B by A: {:.5g} to {:.5g}\n",
      percent_text(sums.different_codes, sums.codes),
      percent_text(sums.different_scales, sums.scales), least_ratio, largest_ratio);
}

// Which side is the better quantization of the original.
std::string original_text(const CheckpointDiff& diff) {
  int64_t a_misrounded = 0;
  int64_t b_misrounded = 0;
  int64_t elements = 0;
  int64_t a_nearer = 0;
  int64_t b_nearer = 0;
  int64_t tensors = 0;
  for (const TensorDiff& tensor : diff.tensors) {
    if (!tensor.a_original) continue;
    ++tensors;
    elements += tensor.a_original->figures.elements;
    a_misrounded += tensor.a_original->misrounded_codes;
    b_misrounded += tensor.b_original->misrounded_codes;
    const double a = tensor.a_original->figures.mse;
    const double b = tensor.b_original->figures.mse;
    a_nearer += a < b ? 1 : 0;
    b_nearer += b < a ? 1 : 0;
  }
  if (tensors == 0) return "";
  const auto part = [&](int64_t count) { return percent_text(count, elements); };
  const std::string verdict = a_misrounded == b_misrounded  ? "equally many"
                              : a_misrounded < b_misrounded ? "A rounds correctly more often"
                                                            : "B rounds correctly more often";
  return fmt::format(
      "off, codes that are not the nearest ones for their scales: A {} % ({}), B {} % ({}); {}\n"
      "nearer to the original: A in {}, B in {} of {} tensors\n",
      part(a_misrounded), a_misrounded, part(b_misrounded), b_misrounded, verdict, a_nearer,
      b_nearer, tensors);
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
  const bool colored = is_colored(output.color);
  std::string text;
  if (num_rows > 0) {
    text = table_text(diff, static_cast<size_t>(num_rows), output);
    if (num_rows < num_different) {
      text += fmt::format("... and {} tensors with smaller errors (-v shows all)\n",
                          num_different - num_rows);
    }
    text += '\n';
  }
  text += detail_text(diff);
  text += stored_text(diff);
  text += original_text(diff);
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
               {"nonfinite"},
               {"different_codes"},
               {"different_scales"},
               {"a_global_scale"},
               {"b_global_scale"},
               {"a_sqnr_db"},
               {"a_misrounded_codes"},
               {"b_sqnr_db"},
               {"b_misrounded_codes"}});
  const auto number = [](double value) { return fmt::format("{}", value); };
  for (const TensorDiff& tensor : diff.tensors) {
    const ErrorFigures& figures = tensor.figures;
    const auto stored = [&](auto value) { return tensor.stored ? value(*tensor.stored) : ""; };
    const auto sqnr = [&](const std::optional<OriginalDiff>& original) {
      return original ? number(original->figures.sqnr_db) : "";
    };
    const auto misrounded = [&](const std::optional<OriginalDiff>& original) {
      return original ? std::to_string(original->misrounded_codes) : "";
    };
    table.add_row({escaped(tensor.name),
                   tensor.status,
                   std::to_string(figures.elements),
                   number(figures.mse),
                   number(figures.relative_error),
                   number(figures.sqnr_db),
                   number(figures.cosine),
                   number(figures.norm_ratio),
                   number(figures.max_abs),
                   std::to_string(figures.max_abs_index),
                   figures.clipped_percent ? number(*figures.clipped_percent) : "",
                   number(figures.flushed_percent),
                   std::to_string(figures.nonfinite),
                   stored([](const StoredDiff& s) { return std::to_string(s.different_codes); }),
                   stored([](const StoredDiff& s) { return std::to_string(s.different_scales); }),
                   stored([&](const StoredDiff& s) { return number(s.a_global_scale); }),
                   stored([&](const StoredDiff& s) { return number(s.b_global_scale); }),
                   sqnr(tensor.a_original),
                   misrounded(tensor.a_original),
                   sqnr(tensor.b_original),
                   misrounded(tensor.b_original)});
  }
  write_stdout(table.to_csv());
}

ExitCode run_diff(const DiffArguments& arguments) {
  set_num_threads(arguments.num_threads);
  CheckpointDiff diff = diff_checkpoints(arguments.a, arguments.b, arguments.options);
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
  command
      .add_option("--original", arguments.options.original,
                  "What A and B were quantized from: says which of them is nearer to it, and "
                  "whose codes are rounded correctly")
      ->option_text("SRC");
  add_threads(command, arguments.num_threads);
  add_output(command, arguments.output, CsvSupport::kYes);
}

}  // namespace narrowfloat::cli
