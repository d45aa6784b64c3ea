// The entry point that libFuzzer calls; NARROWFLOAT_FUZZ_TARGET is a function of fuzz_targets.h.
#include "fuzz/fuzz_targets.h"

// NOLINTNEXTLINE(readability-identifier-naming): the name is libFuzzer's.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  narrowfloat::testing::NARROWFLOAT_FUZZ_TARGET({data, size});
  return 0;
}
