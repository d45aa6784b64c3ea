// narrowfloat quantize SRC DST --to FORMAT: runs the library's quantize_checkpoint() with progress
// and Ctrl-C, and prints what came out.
#include "cli/checkpoint_report.h"
#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/progress.h"

namespace narrowfloat::cli {

ExitCode run(const QuantizeArguments& arguments) {
  set_num_threads(arguments.num_threads);
  const InterruptGuard guard;
  Progress progress("quantize", arguments.progress, arguments.output);
  QuantizeCheckpointOptions options = arguments.options;
  options.progress = [&progress](const ProgressEvent& event) { progress.update(event); };
  options.cancelled = [] { return InterruptGuard::is_requested(); };
  const CheckpointReport report = quantize_checkpoint(arguments.source, arguments.target, options);
  progress.finish();
  const ReportContext context{.command = "quantize",
                              .source = arguments.source,
                              .target = arguments.target,
                              .format = convention_info(options.to).name,
                              .is_dry_run = options.dry_run,
                              .progress = arguments.progress};
  return print_report(report, context, arguments.output);
}

}  // namespace narrowfloat::cli
