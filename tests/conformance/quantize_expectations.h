// Checks that must hold for the output of any quantizer, told from the case and the bytes alone:
// rows that are not visited keep their values, everything else is written, padding is zero, and
// finite input gives finite scales and codes in exact mode.
#pragma once

#include <cstdint>
#include <string>

#include "conformance/quantize_run.h"

namespace narrowfloat::testing {

// Empty, or the first violation in words. `poison`: what the buffers held before.
std::string violation_of(const QuantizeCase& test_case, const QuantizeOutput& output,
                         uint8_t poison);

// The first difference of two outputs of one case in words, the bytes of rows that are not visited
// left out of `values`; empty if there is none.
std::string difference(const QuantizeCase& test_case, const QuantizeOutput& expected,
                       const QuantizeOutput& actual);

// More than 30 % of the codes are zero though the input is not: agreement then proves little.
bool is_mistrusted(const QuantizeCase& test_case, const QuantizeOutput& output);
// Typical data and scales, which should hardly ever be mistrusted.
bool is_typical(const QuantizeCase& test_case);

// Blocks that were quantized.
int64_t num_blocks(const QuantizeCase& test_case);

}  // namespace narrowfloat::testing
