// Finding NaN and infinities in weights, which quantization would hide or spread over a block.
#pragma once

#include <cstdint>

#include "narrowfloat/tensor.h"

namespace narrowfloat {

// Position of the first NaN or infinity of a dense F32, F16 or BF16 tensor; -1 if there is none.
int64_t first_nonfinite(const TensorView& view);

}  // namespace narrowfloat
