// GPTQ's rounding: columns one after another, each making up for the errors of those before it.
#pragma once

#include "layers/hessian_factor.h"
#include "layers/quantized_weight.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat {

// Replaces the codes of `output`, which holds `input` quantized: its scales stay. Rows with a NaN
// or an infinity stay as they are. The result depends neither on the number of threads nor on the
// other rows. For NVFP4, MXFP4 and MXFP8.
void round_compensated(const TensorView& input, MathMode math, float encode_scale,
                       const HessianFactor& factor, QuantizedWeight& output);

// Bytes that it allocates.
uint64_t compensated_rounding_bytes(int64_t cols);

}  // namespace narrowfloat
