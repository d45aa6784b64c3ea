// Scales of a whole tensor or batch: kernels that find maxima before a quantization and store
// scales after it.
//
// No memory but the outputs is needed: a maximum is gathered where its scale will be stored (the
// decode scale of NVFP4, the scale of FP8 per tensor), the quantizing kernel computes the scale
// from it, and a last kernel replaces it by the scale.
#pragma once

#include "ops/quantize/sm90/quantize_params.h"

namespace narrowfloat {

// True where scales are computed from maxima.
bool needs_amax(const QuantizeProblem& problem);
// Zeroes the slots of the maxima.
void clear_amax_slots(const QuantizeProblem& problem, const QuantizeParams& params, Stream stream);
// Finds maxima over the valid rows of any source but a norm, into cleared slots.
void launch_find_amax(const QuantizeProblem& problem, const QuantizeParams& params, Stream stream);
// Stores the scales of tensors, batches or rows (by the problem's axis): from the maxima in their
// slots, or where no kernel over the elements stored them because there are no elements.
void launch_store_tensor_scales(const QuantizeProblem& problem, const QuantizeParams& params,
                                Stream stream);

}  // namespace narrowfloat
