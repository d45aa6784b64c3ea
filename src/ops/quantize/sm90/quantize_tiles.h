// Launcher of the kernel in quantize_tiles.cu.
#pragma once

#include "ops/quantize/sm90/quantize_params.h"

namespace narrowfloat {

// Quantizes FP8 with 128x128 blocks. For norms launch_prepare_norm_rows() must have stored the
// rows' 1 / rms before.
void launch_quantize_tiles(const QuantizeProblem& problem, const QuantizeParams& params,
                           Stream stream);

// Supports the numbers of blocks that one launch holds.
Support tile_extents(const QuantizeProblem& problem);

}  // namespace narrowfloat
