// Runs one quantize case through the public API in guarded, poisoned buffers: on the device under
// test, or on the host where the implementation is for another device.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "conformance/quantize_case.h"
#include "support/tensors.h"

namespace narrowfloat::testing {

// What surrounds a run and must not matter: poison, guards, and what lies in the gaps between input
// rows and in the input rows that are not visited.
struct RunStyle {
  uint8_t poison = 0xCC;
  Guard guard = Guard::kCanary;
};

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

// The layout of the case's output.
QuantizedLayout layout_of(const QuantizeCase& test_case);
// The input matrix as run_quantize() makes it, dense.
Matrix input_of(const QuantizeCase& test_case);

}  // namespace narrowfloat::testing
