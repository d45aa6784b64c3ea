// Calls of 8-bit group quantization, KV caches, row shuffles and bit packing: a part of
// sample_operation_calls().
#pragma once

#include <vector>

#include "cuda/operation_calls.h"
#include "support/random.h"

namespace narrowfloat::testing {

std::vector<OperationCall> small_operation_calls(Random& random);

}  // namespace narrowfloat::testing
