// The commands that write a checkpoint (quantize, dequantize, convert) have most options in common,
// and call one function of the library, with progress and Ctrl-C.
#pragma once

#include <string>
#include <string_view>

#include "cli/checkpoint_report.h"
#include "cli/progress.h"
#include "cli_common/command_line.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat::cli {

template <typename Options>
struct WritingArguments {
  OutputArguments output;
  ProgressMode progress = ProgressMode::kAuto;
  int num_threads = 0;
  std::string source;
  std::string target;
  Options options;
};

// SRC and DST.
template <typename Arguments>
void add_source_and_target(CLI::App& app, Arguments& arguments) {
  add_path(app, "SRC", arguments.source, "A .safetensors file, or a directory with shards");
  add_path(app, "DST", arguments.target, "Where to write: a file for a file, or a directory");
}

// Options that all of these commands have.
template <typename Arguments>
void add_writer(CLI::App& app, Arguments& arguments) {
  add_parsed_into(
      app, "--max-memory", parse_bytes, arguments.options.max_memory_bytes,
      "Budget for buffers, such as 8GiB; 0, the default, is three quarters of what is free")
      ->option_text("BYTES");
  add_parsed_into(app, "--max-shard-size", parse_bytes, arguments.options.max_shard_bytes,
                  "Largest file of the target; default 5GB. A tensor is never split")
      ->option_text("BYTES");
  add_threads(app, arguments.num_threads);
  app.add_flag("--dry-run", arguments.options.dry_run,
               "Check everything and show the plan; write nothing");
  app.add_flag("--force", arguments.options.force, "Replace what is at DST");
  app.add_flag("--resume", arguments.options.resume,
               "Continue an interrupted run of the same command: keep the shards it finished");
  add_choice<ProgressMode>(
      app, "--progress",
      {{"auto", ProgressMode::kAuto}, {"json", ProgressMode::kJson}, {"none", ProgressMode::kNone}},
      arguments.progress, "Progress on stderr: auto (default: on a terminal only), json or none")
      ->option_text("MODE");
}

// Runs `convert`, one of the library's functions, with progress and Ctrl-C, and prints what came
// out.
template <typename Arguments, typename Convert>
ExitCode write_checkpoint(const Arguments& arguments, std::string_view command,
                          std::string_view format, Convert convert) {
  set_num_threads(arguments.num_threads);
  const InterruptGuard guard;
  Progress progress(std::string(command), arguments.progress, arguments.output);
  auto options = arguments.options;
  options.progress = [&progress](const ProgressEvent& event) { progress.update(event); };
  options.cancelled = [] { return InterruptGuard::is_requested(); };
  CheckpointReport report;
  try {
    report = convert(arguments.source, arguments.target, options);
  } catch (const Error& error) {
    throw Error(error.kind(), with_option_spelling(error.what()));
  }
  progress.finish();
  const ReportContext context{.command = command,
                              .source = arguments.source,
                              .target = arguments.target,
                              .format = format,
                              .is_dry_run = options.dry_run,
                              .progress = arguments.progress};
  return print_report(report, context, arguments.output);
}

}  // namespace narrowfloat::cli
