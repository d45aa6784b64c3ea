// The command line of narrowfloat up to the point at which a command would run.
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli_common/command_line.h"
#include "fuzz/fuzz_input.h"
#include "fuzz/fuzz_targets.h"

namespace narrowfloat::testing {
namespace {

using cli::Commands;
using cli::ExitCode;

// Declares the program's commands, and has one that does nothing run whichever is chosen.
void add_idle_commands(const Commands& commands) {
  static std::function<ExitCode()> ignored;
  cli::add_commands({commands.app, ignored});
  commands.chosen = [] { return ExitCode::kDone; };
}

}  // namespace

void fuzz_command_line(std::span<const uint8_t> bytes) {
  std::vector<std::string> words = {"narrowfloat"};
  bool is_new = true;
  for (const uint8_t byte : bytes) {
    if (is_new) words.emplace_back();
    is_new = byte == 0 || byte == '\n';
    if (!is_new) words.back() += static_cast<char>(byte);
  }
  std::vector<const char*> argv;
  for (const std::string& word : words) argv.push_back(word.c_str());
  const int code = cli::run_program({"narrowfloat", "", "", add_idle_commands},
                                    static_cast<int>(argv.size()), argv.data());
  fuzz_require(
      code == static_cast<int>(ExitCode::kDone) || code == static_cast<int>(ExitCode::kUsage),
      "exit code");
}

}  // namespace narrowfloat::testing
