// SwiGLU with the hardware's exponential and reciprocal (moe spec 6.2): each within 2 ulp, so that
// results differ from activation_math.h's by a few.
//
//   h = g * rcp(1 + ex2(-log2(e) * alpha * g)) * (u + beta)     g at most limit_gate, u in
//                                                               +-limit_up, clamps pass NaN
#pragma once

#include "device/ptx/float_ops.cuh"

namespace narrowfloat {

namespace swiglu_detail {

// Computes x * rcp(1 + ex2(t * -log2(e))); for x = t very negative the result is -0.
__device__ inline float times_sigmoid(float x, float t) {
  const float e = exp2_approx(__fmul_rn(t, -0x1.715476p0F));
  return __fmul_rn(x, rcp_approx(__fadd_rn(1.0F, e)));
}

}  // namespace swiglu_detail

__device__ inline float fast_swiglu(float u, float g) {
  return __fmul_rn(swiglu_detail::times_sigmoid(g, g), u);
}

// Params has alpha, beta, limit_gate, limit_up.
template <class Params>
__device__ inline float fast_swiglu(float u, float g, const Params& params) {
  const float gate = min_nan(g, params.limit_gate);
  const float up = -min_nan(-min_nan(u, params.limit_up), params.limit_up);
  // Adding +0 would turn -0 into +0; SwiGLU without a beta keeps -0.
  const float shifted = __fadd_rn(up, params.beta == 0.0F ? -0.0F : params.beta);
  return __fmul_rn(swiglu_detail::times_sigmoid(gate, __fmul_rn(params.alpha, gate)), shifted);
}

}  // namespace narrowfloat
