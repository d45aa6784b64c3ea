// narrowfloat report DIR: the facts of a checkpoint as a page to look at (--html), and as the card
// that is published with it (--model-card).
#include <filesystem>
#include <fstream>
#include <iterator>

#include <fmt/format.h>

#include "cli/checkpoint_report.h"
#include "cli/commands.h"
#include "cli/model_card.h"
#include "cli/progress.h"
#include "cli/report_data.h"
#include "cli/report_html.h"
#include "cli_common/command_line.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat::cli {
namespace {

constexpr const char* kReportExamples = R"(Examples:
  narrowfloat report model-nvfp4 --against model-bf16 --html report.html
  narrowfloat report model-nvfp4 --against model-bf16 --model-card    writes model-nvfp4/README.md
)";

struct ReportArguments {
  OutputArguments output;
  int num_threads = 0;
  std::string path;
  std::string html;
  bool has_card = false;
  bool may_replace = false;
  CheckCheckpointOptions check;
};

constexpr std::uintmax_t kMaxCardBytes = 1 << 20;

// The text of a small file; empty if there is none.
std::string text_of(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) return "";
  if (std::filesystem::file_size(path, error) > kMaxCardBytes) return "";
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// A card that quantize copied from the source is replaced; one that somebody wrote is not.
void check_card(const ReportArguments& arguments, const std::filesystem::path& card,
                const std::string& source_card) {
  if (!std::filesystem::is_directory(arguments.path)) {
    throw Error(ErrorKind::kInvalidArgument,
                "--model-card: the checkpoint must be a directory, whose README.md it is");
  }
  const bool is_copied = !source_card.empty() && text_of(card) == source_card;
  check_output_file("--model-card", card.string(), arguments.may_replace || is_copied);
}

ExitCode run_report(const ReportArguments& arguments) {
  if (arguments.html.empty() && !arguments.has_card) {
    throw Error(ErrorKind::kInvalidArgument,
                "nothing to write: expected --html FILE, --model-card, or both");
  }
  set_num_threads(arguments.num_threads);
  const std::filesystem::path card = std::filesystem::path(arguments.path) / "README.md";
  const std::string source_card =
      arguments.check.against.empty()
          ? ""
          : text_of(std::filesystem::path(arguments.check.against) / "README.md");
  if (!arguments.html.empty()) {
    check_output_file("--html", arguments.html, arguments.may_replace);
  }
  if (arguments.has_card) check_card(arguments, card, source_card);
  const InterruptGuard guard;
  Progress progress("report", ProgressMode::kAuto, arguments.output);
  CheckCheckpointOptions options = arguments.check;
  options.progress = [&progress](const ProgressEvent& event) { progress.update(event); };
  options.cancelled = [] { return InterruptGuard::is_requested(); };
  const ReportData data = gather_report(arguments.path, options);
  progress.finish();
  if (data.check.cancelled) {
    write_stderr("narrowfloat: interrupted: nothing was written\n");
    return ExitCode::kInterrupted;
  }
  std::vector<std::string> written;
  const auto write = [&](const std::string& path, const std::string& text) {
    write_report(path, text);
    written.push_back(path);
  };
  if (!arguments.html.empty()) write(arguments.html, html_report(data));
  if (arguments.has_card) write(card.string(), model_card(data, source_card));
  if (arguments.output.data == DataFormat::kJson) {
    Json document = json_document("report");
    document["path"] = arguments.path;
    document["passed"] = data.check.passed();
    document["files"] = written;
    print_json(document);
  } else if (!arguments.output.is_quiet) {
    for (const std::string& path : written) {
      write_stdout(fmt::format("wrote {}\n", escaped(path)));
    }
  }
  return ExitCode::kDone;
}

}  // namespace

void add_report(const Commands& commands) {
  CLI::App& command = add_command(
      commands, "report", "Write what a checkpoint is and what it cost, as a page or a model card",
      kReportExamples);
  ReportArguments& arguments = arguments_of(command, commands, run_report);
  add_path(command, "PATH", arguments.path, "A .safetensors file, or a directory with shards");
  command
      .add_option("--against", arguments.check.against,
                  "The unquantized checkpoint that it was made from: the error is measured")
      ->option_text("SRC");
  command.add_option("--html", arguments.html, "Write a page that needs nothing else")
      ->option_text("FILE");
  command.add_flag("--model-card", arguments.has_card,
                   "Write PATH/README.md, in place of the copy of SRC's");
  command.add_flag("--force", arguments.may_replace, "Replace files that are there");
  add_threads(command, arguments.num_threads);
  add_output(command, arguments.output, CsvSupport::kNo);
}

}  // namespace narrowfloat::cli
