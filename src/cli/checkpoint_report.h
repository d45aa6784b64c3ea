// What quantize and dequantize did, or with --dry-run would do: the same report for both.
#pragma once

#include <string>
#include <string_view>

#include "cli/arguments.h"
#include "cli/exit_code.h"
#include "narrowfloat/checkpoint.h"

namespace narrowfloat::cli {

struct ReportContext {
  std::string_view command;  // "quantize"
  std::string_view source;
  std::string_view target;
  std::string_view format;  // What it was turned into: "nvfp4-ct", "BF16".
  bool is_dry_run = false;
  ProgressMode progress = ProgressMode::kAuto;  // kJson: warnings are events.
};

// Prints as asked for and returns the exit code: kDone, or kInterrupted for a cancelled run.
ExitCode print_report(const CheckpointReport& report, const ReportContext& context,
                      const OutputArguments& output);

}  // namespace narrowfloat::cli
