// The report of quantize and dequantize, in the words of the command line, says what they did, or
// with --dry-run would do. It is the same for both.
#pragma once

#include <string>
#include <string_view>

#include "cli_common/output.h"
#include "narrowfloat/checkpoint.h"

namespace narrowfloat::cli {

enum class ProgressMode : int { kAuto, kJson, kNone };

struct ReportContext {
  std::string_view command;  // "quantize"
  std::string_view source;
  std::string_view target;
  std::string_view format;  // The target's: "nvfp4-ct", "BF16".
  bool is_dry_run = false;
  ProgressMode progress = ProgressMode::kAuto;  // kJson: warnings are events.
};

// Prints as asked for and returns the exit code: kDone, or kInterrupted for a cancelled run.
ExitCode print_report(const CheckpointReport& report, const ReportContext& context,
                      const OutputArguments& output);

Json figures_json(const ErrorFigures& figures);

// The library names options as its callers write them; people at the command line know them by
// other names. Returns `message` with "option max_memory_bytes" as "--max-memory", and so on.
std::string with_option_spelling(std::string_view message);

}  // namespace narrowfloat::cli
