// Runs one quantize case through the public API in guarded, poisoned buffers: on the device under
// test, or on the host where the implementation is for another device.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "conformance/quantize_call.h"

namespace narrowfloat::testing {

// Everything an operation may write, after the run.
struct QuantizeOutput {
  QuantizedBytes tensor;
  std::vector<uint8_t> extra_scales;
  std::vector<uint8_t> norm_output;
  std::vector<uint8_t> residual;
  bool canaries_intact = false;
  bool inputs_unchanged = false;
};

// Empty if the implementation refuses the case; `refusal`, if given, is why. Throws what else the
// operation throws.
std::optional<QuantizeOutput> run_quantize(const QuantizeCase& test_case,
                                           std::string_view implementation, const RunStyle& style,
                                           std::string* refusal = nullptr);

}  // namespace narrowfloat::testing
