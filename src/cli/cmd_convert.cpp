// narrowfloat convert SRC DST --to CONVENTION: the library's convert_checkpoint().
#include <algorithm>

#include <fmt/format.h>

#include "cli/commands.h"
#include "cli/writing_command.h"

namespace narrowfloat::cli {
namespace {

constexpr const char* kExamples = R"(Examples:
  narrowfloat convert gpt-oss-20b out --to nvfp4-modelopt
  narrowfloat convert model-fp8 out --to nvfp4 --lossy
  narrowfloat convert model-nvfp4 out --to nvfp4-modelopt --exact-only --dry-run
  narrowfloat convert model-mixed out --to nvfp4-modelopt --keep-formats
)";

using ConvertArguments = WritingArguments<ConvertCheckpointOptions>;

std::string target_list() {
  std::string list;
  for (const ConventionInfo& info : all_conventions()) {
    if (!info.is_convert_target) continue;
    list += fmt::format("{}{}", list.empty() ? "" : ", ", info.name);
  }
  return list;
}

bool is_exact(const CheckpointReport& report) {
  return std::all_of(report.tensors.begin(), report.tensors.end(), [](const TensorReport& tensor) {
    return !tensor.conversion || tensor.conversion->is_exact;
  });
}

// With --exact-only a plan comes first: it shows what would change, which is a finding.
ExitCode run_convert(const ConvertArguments& arguments) {
  bool is_refused = false;
  const auto convert = [&](const std::string& source, const std::string& target,
                           ConvertCheckpointOptions& options) {
    if (options.exact_only) {
      ConvertCheckpointOptions plan = options;
      plan.exact_only = false;
      plan.dry_run = true;
      CheckpointReport planned = convert_checkpoint(source, target, plan);
      is_refused = !is_exact(planned);
      if (is_refused || options.dry_run) {
        options.dry_run = true;
        return planned;
      }
    }
    return convert_checkpoint(source, target, options);
  };
  const ExitCode code =
      write_checkpoint(arguments, "convert", convention_info(arguments.options.to).name, convert);
  if (code != ExitCode::kDone || !is_refused) return code;
  write_stderr(
      "narrowfloat: error: --exact-only: not every weight can be converted exactly; nothing was "
      "written\n");
  return ExitCode::kFindings;
}

}  // namespace

void add_convert(const Commands& commands) {
  CLI::App& command = add_command(
      commands, "convert",
      "Convert a quantized checkpoint to another convention, exactly if possible", kExamples);
  ConvertArguments& arguments = arguments_of(command, commands, run_convert);
  ConvertCheckpointOptions& options = arguments.options;
  add_source_and_target(command, arguments);
  with_words(add_parsed_into(command, "--to", in_any_case(parse_convention), options.to,
                             fmt::format("What to write: {}; nvfp4, mxfp4 and mxfp8 mean the "
                                         "compressed-tensors convention",
                                         target_list()))
                 ->required()
                 ->option_text("CONVENTION REQUIRED"),
             target_list() + ", nvfp4, mxfp4, mxfp8");
  CLI::Option* const exact =
      command.add_flag("--exact-only", options.exact_only,
                       "Write nothing, with exit code 1, if anything about a weight would change");
  CLI::Option* const lossy =
      command
          .add_flag("--lossy", options.lossy,
                    "Quantize weights again whose values the target cannot hold")
          ->excludes(exact);
  command
      .add_flag("--keep-formats", options.keep_formats,
                "Mixed precision: weights of other formats keep theirs, in the convention that "
                "goes with CONVENTION")
      ->excludes(lossy);
  add_parsed_into(command, "--math", in_any_case(parse_math_mode), options.math,
                  "Arithmetic of --lossy: exact (default) or fast")
      ->option_text("MODE");
  add_parsed_into(command, "--mx-scale", in_any_case(parse_ue8m0_rounding), options.mx_scale,
                  "MX block scales of --lossy: up (default), floor or even")
      ->option_text("RULE");
  add_choice<ScaleSearch>(command, "--scale-search",
                          {{"amax", ScaleSearch::kAmax},
                           {"4over6", ScaleSearch::kFourOverSix},
                           {"full", ScaleSearch::kFull}},
                          options.scale_search,
                          "Block scales of --lossy: amax (default), 4over6 or full")
      ->option_text("METHOD");
  add_writer(command, arguments);
  add_output(command, arguments.output, CsvSupport::kNo);
}

}  // namespace narrowfloat::cli
