// The kept inputs of the command line.
#include "fuzz/fuzz_targets.h"
#include "fuzz/replay.h"

namespace narrowfloat::testing {
namespace {

TEST(FuzzCorpus, CommandLineIsReadOrRefused) {
  replay("command_line", fuzz_command_line);
  run_short_inputs(fuzz_command_line);
}

}  // namespace
}  // namespace narrowfloat::testing
