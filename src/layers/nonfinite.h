// Finds NaN and infinities in weights, which quantization would hide or spread over a block, and
// block scales that no quantizer writes.
#pragma once

#include <cstdint>
#include <span>

#include "narrowfloat/format.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat {

// Position of the first NaN or infinity of a dense F32, F16 or BF16 tensor; -1 if there is none.
int64_t first_nonfinite(const TensorView& view);

// Number of NaN and infinities.
int64_t count_nonfinite(const TensorView& view);

struct BadScales {
  int64_t nonfinite = 0;
  int64_t negative = 0;  // Minus zero does not count.
};
// Counts bad block scales, as QuantizedWeight holds them.
BadScales bad_scales(ScaleType type, std::span<const std::byte> scales);

}  // namespace narrowfloat
