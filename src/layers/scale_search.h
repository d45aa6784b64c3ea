// Block scales of the least squared error, for quantization of better quality than the scale that
// maps the largest element to the largest code.
#pragma once

#include <span>

#include "layers/quantized_weight.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat {

// Replaces scales and codes of `output`, which hold `input` quantized by its maxima, wherever
// another scale has a smaller squared error; the result is as if all scales of the format had been
// tried. For NVFP4, MXFP4 and MXFP8. `col_weights`: one for each column, of the squared errors in
// it, not negative; or empty, all columns count alike.
void search_scales(const TensorView& input, MathMode math, float encode_scale,
                   std::span<const float> col_weights, QuantizedWeight& output);

}  // namespace narrowfloat
