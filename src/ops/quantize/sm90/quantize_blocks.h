// Launchers of the kernels in quantize_blocks.cuh, one source file for each family of formats.
#pragma once

#include "ops/quantize/sm90/quantize_params.h"

namespace narrowfloat {

void launch_quantize_nvfp4_blocks(const QuantizeProblem& problem, const QuantizeParams& params,
                                  Stream stream);
void launch_quantize_mxfp4_blocks(const QuantizeProblem& problem, const QuantizeParams& params,
                                  Stream stream);
void launch_quantize_mxfp8_blocks(const QuantizeProblem& problem, const QuantizeParams& params,
                                  Stream stream);
// Launches FP8 1x128 and per tensor.
void launch_quantize_fp8_blocks(const QuantizeProblem& problem, const QuantizeParams& params,
                                Stream stream);

}  // namespace narrowfloat
