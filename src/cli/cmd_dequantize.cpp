// narrowfloat dequantize SRC DST --dtype DTYPE: the way back, with the same progress and report.
#include "cli/checkpoint_report.h"
#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/progress.h"

namespace narrowfloat::cli {

ExitCode run(const DequantizeArguments& arguments) {
  set_num_threads(arguments.num_threads);
  const InterruptGuard guard;
  Progress progress("dequantize", arguments.progress, arguments.output);
  DequantizeCheckpointOptions options = arguments.options;
  options.progress = [&progress](const ProgressEvent& event) { progress.update(event); };
  options.cancelled = [] { return InterruptGuard::is_requested(); };
  const CheckpointReport report =
      dequantize_checkpoint(arguments.source, arguments.target, options);
  progress.finish();
  const ReportContext context{.command = "dequantize",
                              .source = arguments.source,
                              .target = arguments.target,
                              .format = name(options.dtype),
                              .is_dry_run = options.dry_run,
                              .progress = arguments.progress};
  return print_report(report, context, arguments.output);
}

}  // namespace narrowfloat::cli
