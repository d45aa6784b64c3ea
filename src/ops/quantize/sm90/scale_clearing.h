// Zeroing scales that no row's threads know of.
#pragma once

#include "ops/quantize/sm90/quantize_params.h"

namespace narrowfloat {

// Zeroes whole scale images, in stream order.
void clear_scale_images(const QuantizeParams& params, Stream stream);

// Zeroes the scales of all rows of a format that has them.
void clear_row_scales(const QuantizeProblem& problem, const QuantizeParams& params, Stream stream);

}  // namespace narrowfloat
