// Zeroes scales that no row's threads write.
#pragma once

#include "ops/quantize/sm90/quantize_params.h"

namespace narrowfloat {

// Zeroes whole scale tensors, in stream order.
void clear_scale_tensors(const QuantizeParams& params, Stream stream);

// Zeroes the scales of all rows of a format that has them.
void clear_row_scales(const QuantizeProblem& problem, const QuantizeParams& params, Stream stream);

}  // namespace narrowfloat
