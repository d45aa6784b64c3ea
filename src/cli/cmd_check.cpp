// narrowfloat check DIR: what is wrong with a checkpoint, worst first, and with --fix DST a copy in
// which what can be repaired without the source is repaired. Exit code 1 where there is a finding.
#include <map>

#include <fmt/format.h>

#include "cli/check_json.h"
#include "cli/checkpoint_report.h"
#include "cli/commands.h"
#include "cli/progress.h"
#include "cli_common/command_line.h"
#include "narrowfloat/check.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat::cli {
namespace {

constexpr const char* kCheckExamples = R"(Examples:
  narrowfloat check model-nvfp4                         headers, config, codes and scales
  narrowfloat check model-nvfp4 --against model-bf16    also the error, and that it is reproducible
  narrowfloat check model-nvfp4 --fix model-fixed       a copy with one global scale for gate and up
)";

struct CheckArguments {
  OutputArguments output;
  ProgressMode progress = ProgressMode::kAuto;
  int num_threads = 0;
  std::string path;
  std::string target;  // DST of --fix; empty: nothing is written.
  CheckCheckpointOptions check;
  FixCheckpointOptions fix;
};

// Findings of one rule that are shown without -v.
constexpr int64_t kMaxOfRule = 8;

Tone tone_of(Severity severity) {
  switch (severity) {
    case Severity::kError:
      return Tone::kBad;
    case Severity::kWarning:
      return Tone::kHeading;
    case Severity::kNote:
      break;
  }
  return Tone::kFaint;
}

std::string counted(int64_t count, std::string_view noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

// One line for each finding.
std::string finding_lines(const CheckpointCheck& check, const OutputArguments& output,
                          bool colored) {
  std::string text;
  std::map<std::string, int64_t> shown;
  std::map<std::string, int64_t> hidden;
  for (const Finding& finding : check.findings) {
    if (!output.is_verbose && shown[finding.id] == kMaxOfRule) {
      ++hidden[finding.id];
      continue;
    }
    ++shown[finding.id];
    text += paint(fmt::format("{:7}", name(finding.severity)), tone_of(finding.severity), colored);
    text += fmt::format(" {} ", finding.id);
    if (!finding.tensor.empty()) text += escaped(finding.tensor) + ": ";
    text += with_option_spelling(finding.message) + "\n";
  }
  for (const auto& [id, count] : hidden) {
    text += fmt::format("... and {} more of {} (-v shows all)\n", count, id);
  }
  return text;
}

int64_t count_quantized(const CheckpointCheck& check) {
  int64_t count = 0;
  for (const CheckedTensor& checked : check.tensors) count += checked.tensor.convention ? 1 : 0;
  return count;
}

std::string against_lines(const CheckpointCheck& check) {
  int64_t again = 0;
  int64_t identical = 0;
  for (const CheckedTensor& checked : check.tensors) {
    if (!checked.requantization) continue;
    ++again;
    identical += checked.requantization->is_identical() ? 1 : 0;
  }
  std::string text;
  if (check.total.elements > 0) {
    text += fmt::format("error against the source: SQNR {} dB, cosine {:.6f}, norm ratio {:.6f}\n",
                        format_fixed(check.total.sqnr_db, 2), check.total.cosine,
                        check.total.norm_ratio);
  }
  if (again > 0) {
    text +=
        fmt::format("quantized again: {} of {} weights have the same bytes\n", identical, again);
  }
  return text;
}

std::string verdict(const CheckpointCheck& check, std::string_view path, bool colored) {
  return fmt::format(
      "{}: {}: {}, {}, {} in {} ({} quantized); read {}\n", escaped(path),
      check.passed() ? paint("passed", Tone::kGood, colored) : paint("failed", Tone::kBad, colored),
      counted(check.count(Severity::kError), "error"),
      counted(check.count(Severity::kWarning), "warning"),
      counted(check.count(Severity::kNote), "note"),
      counted(static_cast<int64_t>(check.tensors.size()), "tensor"), count_quantized(check),
      format_bytes(check.read_bytes));
}

void print_check(const CheckpointCheck& check, std::string_view path,
                 const OutputArguments& output) {
  const bool colored = is_colored(output.color);
  write_stdout(finding_lines(check, output, colored) + against_lines(check) +
               verdict(check, path, colored));
}

// Lists what --fix changed, with its error.
void print_fix(const CheckpointReport& report, const OutputArguments& output) {
  using enum Table::Align;
  Table table({{"tensor", kLeft}, {"SQNR dB", kRight}, {"max abs", kRight}, {"flushed %", kRight}});
  for (const TensorReport& tensor : report.tensors) {
    if (!tensor.figures) continue;
    table.add_row({escaped(tensor.name), format_fixed(tensor.figures->sqnr_db, 2),
                   fmt::format("{:.3e}", tensor.figures->max_abs),
                   fmt::format("{:.2f}", tensor.figures->flushed_percent)});
  }
  write_stdout(
      fmt::format("rescaled to the global scale that they are merged with, with this "
                  "change of their values:\n{}\n",
                  table.to_text(is_colored(output.color))));
}

Json fix_json(const CheckpointReport& report, const CheckArguments& arguments,
              const CheckpointCheck& after) {
  Json tensors = Json::array();
  for (const TensorReport& tensor : report.tensors) {
    if (!tensor.figures) continue;
    tensors.push_back(Json{{"name", tensor.name}, {"figures", figures_json(*tensor.figures)}});
  }
  return Json{{"target", arguments.target},
              {"tensors", tensors},
              {"figures", figures_json(report.total)},
              {"files", report.files},
              {"passed", after.passed()},
              {"findings", findings_json(after)}};
}

Json document_of(const CheckArguments& arguments, const CheckpointCheck& check) {
  Json document = json_document("check");
  document["path"] = arguments.path;
  document["against"] =
      arguments.check.against.empty() ? Json(nullptr) : Json(arguments.check.against);
  document["passed"] = check.passed();
  document["errors"] = check.count(Severity::kError);
  document["warnings"] = check.count(Severity::kWarning);
  document["notes"] = check.count(Severity::kNote);
  document["read_bytes"] = check.read_bytes;
  document["findings"] = findings_json(check);
  document["metadata"] = check.metadata;
  document["figures"] = check.total.elements > 0 ? figures_json(check.total) : Json(nullptr);
  document["tensors"] = checked_tensors_json(check);
  document["fix"] = nullptr;
  return document;
}

ExitCode interrupted() {
  write_stderr("narrowfloat: interrupted\n");
  return ExitCode::kInterrupted;
}

template <typename Options>
Options with_progress(const Options& options, Progress& progress) {
  Options result = options;
  result.progress = [&progress](const ProgressEvent& event) { progress.update(event); };
  result.cancelled = [] { return InterruptGuard::is_requested(); };
  return result;
}

CheckpointCheck run_one(const std::string& path, const CheckArguments& arguments) {
  Progress progress("check", arguments.progress, arguments.output);
  return check_checkpoint(path, with_progress(arguments.check, progress));
}

ExitCode run_fix(const CheckArguments& arguments, Json& document) {
  CheckpointReport report;
  {
    Progress progress("fix", arguments.progress, arguments.output);
    report =
        fix_checkpoint(arguments.path, arguments.target, with_progress(arguments.fix, progress));
  }
  if (report.cancelled) return interrupted();
  const CheckpointCheck after = run_one(arguments.target, arguments);
  if (after.cancelled) return interrupted();
  if (arguments.output.data == DataFormat::kJson) {
    document["fix"] = fix_json(report, arguments, after);
  } else if (!arguments.output.is_quiet) {
    print_fix(report, arguments.output);
    print_check(after, arguments.target, arguments.output);
  }
  return after.passed() ? ExitCode::kDone : ExitCode::kFindings;
}

ExitCode run_check(const CheckArguments& arguments) {
  set_num_threads(arguments.num_threads);
  const InterruptGuard guard;
  try {
    const CheckpointCheck check = run_one(arguments.path, arguments);
    if (check.cancelled) return interrupted();
    const bool is_json = arguments.output.data == DataFormat::kJson;
    Json document;
    if (is_json) {
      document = document_of(arguments, check);
    } else if (!arguments.output.is_quiet) {
      print_check(check, arguments.path, arguments.output);
    }
    ExitCode code = check.passed() ? ExitCode::kDone : ExitCode::kFindings;
    if (!arguments.target.empty()) code = run_fix(arguments, document);
    if (is_json && code != ExitCode::kInterrupted) print_json(document);
    return code;
  } catch (const Error& error) {
    throw Error(error.kind(), with_option_spelling(error.what()));
  }
}

}  // namespace

void add_check(const Commands& commands) {
  CLI::App& command =
      add_command(commands, "check", "Find what is wrong with a checkpoint, and repair what can be",
                  kCheckExamples);
  CheckArguments& arguments = arguments_of(command, commands, run_check);
  add_path(command, "PATH", arguments.path, "A .safetensors file, or a directory with shards");
  CLI::Option* against =
      command
          .add_option("--against", arguments.check.against,
                      "The unquantized checkpoint that it was made from: measure the error, and "
                      "quantize it again to the same bytes")
          ->option_text("SRC");
  command
      .add_flag("--scales-only", arguments.check.scales_only,
                "Read headers and scales, but no codes: fast, and finds less")
      ->excludes(against)
      ->option_text(" ");
  CLI::Option* fix =
      command
          .add_option("--fix", arguments.target,
                      "Write a copy in which weights that are merged share a global scale; the "
                      "exit code is then that of checking DST")
          ->option_text("DST");
  command.add_flag("--force", arguments.fix.force, "Replace what is at DST")
      ->needs(fix)
      ->option_text(" ");
  command.add_flag("--resume", arguments.fix.resume, "Continue an interrupted --fix")
      ->needs(fix)
      ->option_text(" ");
  add_parsed_into(command, "--max-memory", parse_bytes, arguments.fix.max_memory_bytes,
                  "Budget for buffers of --fix; 0, the default, is three quarters of what is free")
      ->needs(fix)
      ->option_text("BYTES");
  add_parsed_into(command, "--max-shard-size", parse_bytes, arguments.fix.max_shard_bytes,
                  "Largest file of DST; default 5GB. A tensor is never split")
      ->needs(fix)
      ->option_text("BYTES");
  add_threads(command, arguments.num_threads);
  add_output(command, arguments.output, CsvSupport::kNo);
}

}  // namespace narrowfloat::cli
