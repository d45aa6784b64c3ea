// narrowfloat-bench: the program that measures the library: the speed of its operations and of
// Mixture-of-Experts layers, and what quantization costs a small model.
#include "bench_cli/commands.h"
#include "cli_common/command_line.h"

namespace narrowfloat::cli {
namespace {

constexpr const char* kDescription =
    "Measure narrowfloat: operations on the CPU or a GPU, Mixture-of-Experts layers, and what "
    "quantization costs a small model.";
constexpr const char* kFooter = R"(Start here:
  narrowfloat-bench bench                           the speed of every format beside memcpy
  narrowfloat-bench moe bench --shape gpt-oss-20b   the time of a layer in the shape of a model
  narrowfloat-bench allreduce --ranks 2 --shape 16x2880 --pattern all
                                                    the fused all-reduce, on CPUs or GPUs
  narrowfloat-bench eval models/tiny-moe            bits per byte with the experts in every mode
The program narrowfloat quantizes checkpoints, looks into them, and tunes and explains layers.
Every command has --help with examples and exit codes. Documentation: docs/cli.md)";

void add_commands(const Commands& commands) {
  add_bench(commands);
  add_allreduce(commands);
  add_expert_parallel(commands);
  add_ep_model(commands);
  add_eval(commands);
  const Commands moe = add_group(commands, "moe", "Run or time a Mixture-of-Experts layer");
  moe.app.footer("Try: narrowfloat-bench moe run --help, narrowfloat-bench moe bench --help");
  add_moe_run(moe);
  add_moe_bench(moe);
  add_moe_gemm(moe);
}

int run(int argc, const char* const* argv) {
  return run_program({"narrowfloat-bench", kDescription, kFooter, add_commands}, argc, argv);
}

}  // namespace
}  // namespace narrowfloat::cli

int main(int argc, char** argv) { return narrowfloat::cli::run(argc, argv); }
