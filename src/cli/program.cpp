// narrowfloat: the program for checkpoints and for questions about the library. Benchmarks are
// commands of another program, narrowfloat-bench (src/bench_cli).
#include <array>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include "cli/commands.h"
#include "cli_common/command_line.h"

namespace narrowfloat::cli {
namespace {

constexpr const char* kDescription =
    "Quantize checkpoints to block-scaled 4-bit and 8-bit floating point, look into them, and "
    "measure what it cost.";
constexpr const char* kFooter = R"(Start here:
  narrowfloat quantize MODEL OUT --to nvfp4    quantize a directory with config.json and shards
  narrowfloat inspect OUT                      what is in it now
  narrowfloat check OUT --against MODEL        whether it is right
  narrowfloat diff MODEL OUT                   how much accuracy it cost
bench, allreduce, experts, ep-model, eval, moe run, moe bench and moe gemm are in narrowfloat-bench.
Every command has --help with examples and exit codes. Documentation: docs/cli.md)";

// Commands of narrowfloat-bench that people look for here.
constexpr std::array<std::string_view, 8> kBenchCommands = {
    "bench", "allreduce", "experts", "ep-model", "eval", "moe run", "moe bench", "moe gemm"};

// The command of narrowfloat-bench that the command line begins with; empty if there is none.
std::string_view bench_command(int argc, const char* const* argv) {
  const std::string one_word = argc > 1 ? argv[1] : "";
  const std::string two_words = argc > 2 ? fmt::format("{} {}", one_word, argv[2]) : one_word;
  for (const std::string_view command : kBenchCommands) {
    if (command == one_word || command == two_words) return command;
  }
  return "";
}

}  // namespace

void add_commands(const Commands& commands) {
  add_quantize(commands);
  add_dequantize(commands);
  add_convert(commands);
  add_inspect(commands);
  add_check(commands);
  add_diff(commands);
  add_report(commands);
  add_explain(commands);
  add_doctor(commands);
  const Commands moe = add_group(commands, "moe", "Tune or explain a Mixture-of-Experts layer");
  moe.app.footer("Try: narrowfloat moe tune --help, narrowfloat moe explain --help");
  add_moe_tune(moe);
  add_moe_explain(moe);
  add_moe_place(moe);
}

int run(int argc, const char* const* argv) {
  const std::string_view moved = bench_command(argc, argv);
  if (!moved.empty()) {
    write_stderr(
        fmt::format("narrowfloat: error: '{0}' is a command of narrowfloat-bench\n"
                    "Try: narrowfloat-bench {0} --help\n",
                    moved));
    return static_cast<int>(ExitCode::kUsage);
  }
  return run_program({"narrowfloat", kDescription, kFooter, add_commands}, argc, argv);
}

}  // namespace narrowfloat::cli
