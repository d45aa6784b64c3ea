// One call of the quantizer, as a case of the conformance tests, beside the oracle: what tests of
// single implementations on chosen shapes are made of.
#pragma once

#include <string_view>

#include "conformance/quantize_case.h"

namespace narrowfloat::testing {

// In the format's default layout.
QuantizeCase make_case(FormatId format, RowSourceKind source, int64_t rows, int64_t cols);

// Every byte of every output of the GPU's implementation of this idea is the oracle's.
void expect_oracle(QuantizeCase test_case, std::string_view idea);

}  // namespace narrowfloat::testing
