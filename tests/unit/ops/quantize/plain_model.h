// The formulas of the specification once more, written for reading and sharing no code with the
// library: conversions by search over the code values, flush-to-zero by exact products. What the
// tests of quantize compare with where a second opinion is needed.
#pragma once

#include <cstdint>
#include <vector>

#include "narrowfloat/quantize.h"

namespace narrowfloat::testing {

// Correctly rounded products with denormals flushed; tininess after rounding (spec 4.2).
float multiply(float x, float y, MathMode math);
// 1 / x, or the approximate reciprocal.
float reciprocal(float x, MathMode math);

uint8_t model_e2m1(float x);
uint8_t model_e4m3(float x);
float model_e4m3_value(uint8_t code);

struct ModelBlock {
  uint8_t scale = 0;
  std::vector<uint8_t> codes;  // One a byte.
};

// Spec 6.1. x: 16 elements, not all NaN.
ModelBlock model_nvfp4(const std::vector<float>& x, float encode_scale, MathMode math);
// Spec 6.3, exact mode, per tensor. x: finite.
ModelBlock model_four_over_six(const std::vector<float>& x, float encode_scale,
                               const FourOverSix& options);
// Spec 6.4 and 6.5 with rule up. x: 32 finite elements.
ModelBlock model_mx(const std::vector<float>& x, bool is_fp4, MathMode math);

// gate * sigmoid(gate) * up before its rounding to 16 bits (spec 6.12).
float model_silu_mul(float gate, float up, MathMode math);
// The fixed tree over squares (spec 6.12), recursively.
float model_sum_of_squares(const std::vector<float>& h);
// 1 / sqrt(mean + eps).
float model_reciprocal_rms(const std::vector<float>& h, float eps);

}  // namespace narrowfloat::testing
