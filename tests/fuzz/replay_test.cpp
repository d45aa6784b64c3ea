// The kept inputs of the parsers and of the C++ API.
#include "fuzz/replay.h"

#include "fuzz/fuzz_targets.h"

namespace narrowfloat::testing {
namespace {

TEST(FuzzCorpus, HeaderKeepsItsPromises) {
  replay("header", fuzz_header);
  run_short_inputs(fuzz_header);
}

TEST(FuzzCorpus, IndexKeepsItsPromises) {
  replay("index", fuzz_index);
  run_short_inputs(fuzz_index);
}

TEST(FuzzCorpus, ConfigKeepsItsPromises) {
  replay("config", fuzz_config);
  run_short_inputs(fuzz_config);
}

TEST(FuzzCorpus, ApiRefusesWhateverItCannotDo) {
  replay("api", fuzz_api);
  run_short_inputs(fuzz_api);
}

}  // namespace
}  // namespace narrowfloat::testing
