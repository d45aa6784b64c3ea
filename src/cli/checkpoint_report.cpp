// Summaries for people fit on a screen; the tensor table comes with --dry-run and -v. The JSON
// document always has all tensors.
#include "cli/checkpoint_report.h"

#include <algorithm>
#include <array>
#include <cctype>

#include <fmt/format.h>

namespace narrowfloat::cli {
namespace {

// The one table of both names. A field that is missing here is shown as the library wrote it.
struct Spelling {
  std::string_view field;  // A field of the options of a library's function.
  std::string_view option;
};
constexpr std::array kSpellings = {
    Spelling{"against", "--against"},
    Spelling{"fix", "--fix"},
    Spelling{"scales_only", "--scales-only"},
    Spelling{"include", "--include"},
    Spelling{"exclude", "--exclude"},
    Spelling{"mx_scale", "--mx-scale"},
    Spelling{"scale_search", "--scale-search"},
    Spelling{"keep_nonfinite", "--nonfinite keep"},
    Spelling{"max_memory_bytes", "--max-memory"},
    Spelling{"max_shard_bytes", "--max-shard-size"},
    Spelling{"dry_run", "--dry-run"},
    Spelling{"force", "--force"},
    Spelling{"resume", "--resume"},
    Spelling{"dtype", "--dtype"},
    Spelling{"rules", "--rule"},
    Spelling{"target_bits", "--target-bits"},
    Spelling{"activation_amax", "--activation-amax"},
    Spelling{"activation_moments", "--activation-moments"},
    Spelling{"gptq", "--gptq"},
    Spelling{"exact_only", "--exact-only"},
    Spelling{"lossy", "--lossy"},
    Spelling{"keep_formats", "--keep-formats"},
    Spelling{"to", "--to"},
};

constexpr std::string_view kMark = "option ";

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

// The field that `text` begins with; nullptr if there is none.
const Spelling* spelling_at(std::string_view text) {
  for (const Spelling& spelling : kSpellings) {
    if (!text.starts_with(spelling.field)) continue;
    if (text.size() == spelling.field.size() || !is_word(text[spelling.field.size()])) {
      return &spelling;
    }
  }
  return nullptr;
}

constexpr std::string_view kCopy = "copy";

// Sums over the tensors of one action.
struct ActionTotals {
  int64_t tensors = 0;
  int64_t elements = 0;
  uint64_t source_bytes = 0;
  uint64_t target_bytes = 0;
};

struct ReportTotals {
  ActionTotals converted;
  ActionTotals copied;
  // Sums over the weights that a conversion writes.
  int64_t weights = 0;
  int64_t exact_weights = 0;
  int64_t blocks = 0;
  int64_t exact_blocks = 0;
  bool has_all_blocks = true;  // False if a plan does not know all exact blocks.
  double global_scale_change = 0;

  void add(const ConversionFigures& figures) {
    ++weights;
    exact_weights += figures.is_exact ? 1 : 0;
    blocks += figures.blocks;
    exact_blocks += figures.exact_blocks.value_or(0);
    has_all_blocks = has_all_blocks && figures.exact_blocks;
    global_scale_change = std::max(global_scale_change, figures.global_scale_change);
  }
};

// The library has checked that the product fits.
int64_t num_elements(const TensorReport& tensor) {
  int64_t elements = 1;
  for (const int64_t extent : tensor.shape) elements *= extent;
  return elements;
}

ReportTotals sum_up(const CheckpointReport& report) {
  ReportTotals totals;
  for (const TensorReport& tensor : report.tensors) {
    ActionTotals& sum = tensor.action == kCopy ? totals.copied : totals.converted;
    ++sum.tensors;
    sum.elements += num_elements(tensor);
    sum.source_bytes += tensor.source_bytes;
    sum.target_bytes += tensor.target_bytes;
    if (tensor.conversion) totals.add(*tensor.conversion);
  }
  return totals;
}

// 1 where there is nothing to compare: an empty checkpoint is neither smaller nor larger.
double ratio(uint64_t numerator, uint64_t denominator) {
  if (denominator == 0) return 1;
  return static_cast<double>(numerator) / static_cast<double>(denominator);
}

// Counts all that was written: codes, scales and padding.
double average_bits(const ActionTotals& totals) {
  if (totals.elements == 0) return 0;
  return 8 * static_cast<double>(totals.target_bytes) / static_cast<double>(totals.elements);
}

// Source bytes through the quantizer in its own time; 0 where nothing was timed.
double quantizer_gb_per_second(const CheckpointReport& report) {
  if (report.quantize_seconds <= 0) return 0;
  return static_cast<double>(report.quantized_source_bytes) / report.quantize_seconds / 1e9;
}

Json to_json(const ActionTotals& totals) {
  return Json{{"tensors", totals.tensors},
              {"elements", totals.elements},
              {"source_bytes", totals.source_bytes},
              {"target_bytes", totals.target_bytes},
              {"bits_per_weight", average_bits(totals)}};
}

Json to_json(const TensorReport& tensor) {
  Json json{{"name", tensor.name},
            {"action", tensor.action},
            {"reason", with_option_spelling(tensor.reason)},
            {"format", tensor.format.empty() ? Json(nullptr) : Json(tensor.format)},
            {"shape", tensor.shape},
            {"source_bytes", tensor.source_bytes},
            {"target_bytes", tensor.target_bytes},
            {"figures", nullptr}};
  if (tensor.figures) json["figures"] = figures_json(*tensor.figures);
  if (tensor.conversion) {
    const ConversionFigures& conversion = *tensor.conversion;
    json["conversion"] = Json{{"exact", conversion.is_exact},
                              {"blocks", conversion.blocks},
                              {"exact_blocks", nullptr},
                              {"global_scale_change", conversion.global_scale_change}};
    if (conversion.exact_blocks) json["conversion"]["exact_blocks"] = *conversion.exact_blocks;
  }
  return json;
}

// The document is complete whatever -v and --quiet say: a program does not know which fields it
// will want.
void print_document(const CheckpointReport& report, const ReportContext& context) {
  const ReportTotals totals = sum_up(report);
  Json document = json_document(context.command);
  document["source"] = context.source;
  document["target"] = context.target;
  document["format"] = context.format;
  document["dry_run"] = context.is_dry_run;
  document["cancelled"] = report.cancelled;
  document["source_bytes"] = report.source_bytes;
  document["target_bytes"] = report.target_bytes;
  document["converted"] = to_json(totals.converted);
  document["copied"] = to_json(totals.copied);
  if (totals.weights > 0) {
    document["conversion"] =
        Json{{"weights", totals.weights},
             {"exact_weights", totals.exact_weights},
             {"blocks", totals.blocks},
             {"exact_blocks", totals.has_all_blocks ? Json(totals.exact_blocks) : Json(nullptr)},
             {"global_scale_change", totals.global_scale_change}};
  }
  document["peak_buffer_bytes"] = report.peak_buffer_bytes;
  document["seconds"] = report.seconds;
  document["quantize_seconds"] = report.quantize_seconds;
  document["quantizer_gb_per_second"] = quantizer_gb_per_second(report);
  document["figures"] = report.total.elements > 0 ? figures_json(report.total) : Json(nullptr);
  document["files"] = report.files;
  document["file_sizes"] = Json::array();
  for (size_t i = 0; i < report.files.size(); ++i) {
    document["file_sizes"].push_back(
        Json{{"name", report.files[i]}, {"size_bytes", report.file_bytes[i]}});
  }
  document["notes"] = Json::array();
  for (const std::string& note : report.notes) {
    document["notes"].push_back(with_option_spelling(note));
  }
  document["warnings"] = Json::array();
  for (const std::string& warning : report.warnings) {
    document["warnings"].push_back(with_option_spelling(warning));
  }
  document["tensors"] = Json::array();
  for (const TensorReport& tensor : report.tensors) document["tensors"].push_back(to_json(tensor));
  print_json(document);
}

bool has_several_formats(const CheckpointReport& report) {
  std::string_view first;
  for (const TensorReport& tensor : report.tensors) {
    if (tensor.format.empty()) continue;
    if (!first.empty() && first != tensor.format) return true;
    first = tensor.format;
  }
  return false;
}

// Both sets in one table, in the order of the checkpoint; faint rows are left alone. Where formats
// are mixed they stand for the action.
std::string tensor_table(const CheckpointReport& report, const ReportContext& context,
                         bool colored) {
  using enum Table::Align;
  Table table({{"action", kLeft},
               {"shape", kRight},
               {"before", kRight},
               {"after", kRight},
               {"SQNR dB", kRight},
               {"tensor", kLeft},
               {context.command == "convert" ? "why not exact" : "why", kLeft}});
  const bool is_mixed = has_several_formats(report);
  for (const TensorReport& tensor : report.tensors) {
    const bool is_copy = tensor.action == kCopy;
    table.add_row({is_mixed && !tensor.format.empty() ? tensor.format : tensor.action,
                   format_shape(tensor.shape), format_bytes(tensor.source_bytes),
                   format_bytes(tensor.target_bytes),
                   tensor.figures ? format_fixed(tensor.figures->sqnr_db, 2) : "-",
                   escaped(tensor.name), escaped(with_option_spelling(tensor.reason))},
                  is_copy ? Tone::kFaint : Tone::kPlain);
  }
  return table.to_text(colored) + "\n";
}

// The figures over all quantized tensors.
std::string figures_text(const ErrorFigures& figures) {
  std::string text = fmt::format(
      "SQNR       {} dB\n"
      "cosine     {:.6f}\n"
      "norm ratio {:.6f}\n",
      format_fixed(figures.sqnr_db, 2), figures.cosine, figures.norm_ratio);
  if (figures.nonfinite > 0) {
    text += fmt::format("left out   {} elements that are NaN or infinite\n", figures.nonfinite);
  }
  return text;
}

// How much of the weights is as before; the figures after it are of the others.
std::string conversion_text(const ReportTotals& totals) {
  std::string text =
      fmt::format("exact      {} of {} weights", totals.exact_weights, totals.weights);
  if (totals.has_all_blocks) {
    text += fmt::format(
        ", values of {} of {} blocks ({:.4g} %)", totals.exact_blocks, totals.blocks,
        percent_of(static_cast<double>(totals.exact_blocks), static_cast<double>(totals.blocks)));
  }
  if (totals.global_scale_change > 0) {
    text += fmt::format("; global scales change by up to {:.2g}", totals.global_scale_change);
  }
  return text + "\n";
}

std::string time_text(const CheckpointReport& report) {
  std::string text = fmt::format("time       {}", format_duration(report.seconds));
  const double rate = quantizer_gb_per_second(report);
  if (rate > 0) text += fmt::format(", {:.2f} GB/s in the quantizer", rate);
  return text + "\n";
}

// One fact on a line, the same labels for both commands, so that two runs can be compared by eye.
std::string summary(const CheckpointReport& report, const ReportContext& context) {
  const ReportTotals totals = sum_up(report);
  const bool is_quantize = context.command == "quantize";
  std::string text = fmt::format(
      "format     {}\n"
      "{} {} tensors, {} -> {}, {:.3f} bits per weight\n"
      "copied     {} tensors, {}\n"
      "size       {} -> {}, {:.2f} times {}\n",
      context.format, is_quantize ? "quantized " : "converted ", totals.converted.tensors,
      format_bytes(totals.converted.source_bytes), format_bytes(totals.converted.target_bytes),
      average_bits(totals.converted), totals.copied.tensors,
      format_bytes(totals.copied.target_bytes), format_bytes(report.source_bytes),
      format_bytes(report.target_bytes),
      report.target_bytes <= report.source_bytes ? ratio(report.source_bytes, report.target_bytes)
                                                 : ratio(report.target_bytes, report.source_bytes),
      report.target_bytes <= report.source_bytes ? "smaller" : "larger");
  for (const std::string& note : report.notes) {
    text += fmt::format("formats    {}\n", escaped(with_option_spelling(note)));
  }
  if (totals.weights > 0) text += conversion_text(totals);
  if (report.total.elements > 0) text += figures_text(report.total);
  text += fmt::format("memory     {} of buffers\n", format_bytes(report.peak_buffer_bytes));
  if (!context.is_dry_run) text += time_text(report);
  return text;
}

std::string file_list(const CheckpointReport& report, const ReportContext& context) {
  std::string text = context.is_dry_run ? "would write " : "wrote      ";
  for (size_t i = 0; i < report.files.size(); ++i) {
    text += fmt::format("{}{} ({})", i == 0 ? "" : ", ", escaped(report.files[i]),
                        format_bytes(report.file_bytes[i]));
  }
  return text + "\n";
}

void print_warnings(const CheckpointReport& report, const ReportContext& context) {
  for (const std::string& warning : report.warnings) {
    const std::string text = with_option_spelling(warning);
    if (context.progress == ProgressMode::kJson) {
      print_json_event(Json{{"event", "warning"}, {"message", text}});
    } else {
      warn(text);
    }
  }
}

}  // namespace

Json figures_json(const ErrorFigures& figures) {
  return Json{{"elements", figures.elements},
              {"mse", json_number(figures.mse)},
              {"relative_error", json_number(figures.relative_error)},
              {"sqnr_db", json_number(figures.sqnr_db)},
              {"cosine", json_number(figures.cosine)},
              {"norm_ratio", json_number(figures.norm_ratio)},
              {"max_abs", json_number(figures.max_abs)},
              {"max_abs_index", figures.max_abs_index},
              {"clipped_percent",
               figures.clipped_percent ? json_number(*figures.clipped_percent) : Json(nullptr)},
              {"flushed_percent", json_number(figures.flushed_percent)},
              {"nonfinite", figures.nonfinite}};
}

std::string with_option_spelling(std::string_view message) {
  std::string text;
  while (true) {
    const size_t mark = message.find(kMark);
    if (mark == std::string_view::npos) return text.append(message);
    text.append(message.substr(0, mark));
    message.remove_prefix(mark + kMark.size());
    const Spelling* spelling = spelling_at(message);
    text.append(spelling == nullptr ? kMark : spelling->option);
    if (spelling != nullptr) message.remove_prefix(spelling->field.size());
  }
}

ExitCode print_report(const CheckpointReport& report, const ReportContext& context,
                      const OutputArguments& output) {
  if (!output.is_quiet) print_warnings(report, context);
  if (report.cancelled) {
    const std::string kept =
        report.kept_files == 0
            ? ""
            : fmt::format("; {} finished shards wait beside it for --resume", report.kept_files);
    write_stderr(fmt::format("narrowfloat: interrupted: nothing was left at {}{}\n",
                             escaped(context.target), kept));
    return ExitCode::kInterrupted;
  }
  if (output.data == DataFormat::kJson) {
    print_document(report, context);
    return ExitCode::kDone;
  }
  if (output.is_quiet) return ExitCode::kDone;
  const bool colored = is_colored(output.color);
  const bool has_details = context.is_dry_run || output.is_verbose;
  std::string text;
  if (has_details) text += tensor_table(report, context, colored);
  text += paint(fmt::format("{}{} -> {}", context.is_dry_run ? "plan: " : "",
                            escaped(context.source), escaped(context.target)),
                Tone::kHeading, colored);
  text += '\n';
  text += summary(report, context);
  if (has_details) text += file_list(report, context);
  write_stdout(text);
  return ExitCode::kDone;
}

}  // namespace narrowfloat::cli
