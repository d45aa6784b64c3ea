// The activations (moe spec 6.2), shared by CPU and CUDA code: in fp32 from portable functions, and
// in double, the reference of every tolerance. Every written operation rounds once, in the order of
// the code; sigma(z) = 1 / (1 + exp(-z)).
//
//   silu(g, a) = g * sigma(a * g)   as g / (1 + exp(-(a * g))): for very negative gates that is
//                                   -0, where sigma as a factor could be 0 * infinity
//   gelu_erf(x) = x * Phi(x)        Phi the normal distribution function, (1 + erf(x / sqrt 2)) / 2
//   gelu_tanh(x) = silu(x, 2 * z)   as (1 + tanh z) / 2 = sigma(2 z), which keeps the lower tail
//
// A NaN in u or g gives NaN: clamps compare so that NaN passes.
#pragma once

#include <cmath>

#include "base/portable_math.h"
#include "narrowfloat/activation.h"

namespace narrowfloat {

// The parameters of one expert.
template <typename Real>
struct ActivationParams {
  Real alpha;
  Real beta;
  Real limit_gate;
  Real limit_up;
};

namespace activation_detail {

NF_HOST_DEVICE inline float exponential(float x) { return exp_portable(x); }
NF_HOST_DEVICE inline double exponential(double x) { return std::exp(x); }
NF_HOST_DEVICE inline float tangent(float x) { return tanh_portable(x); }
NF_HOST_DEVICE inline double tangent(double x) { return std::tanh(x); }
NF_HOST_DEVICE inline float distribution(float x) { return normal_cdf(x); }
NF_HOST_DEVICE inline double distribution(double x) {
  constexpr double kSqrtHalf = 0x1.6a09e667f3bcdp-1;
  return 0.5 * std::erfc(-x * kSqrtHalf);
}

template <typename Real>
NF_HOST_DEVICE Real clamp_above(Real x, Real limit) {
  return x > limit ? limit : x;
}
template <typename Real>
NF_HOST_DEVICE Real clamp_both(Real x, Real limit) {
  const Real below = clamp_above(x, limit);
  return below < -limit ? -limit : below;
}
// The result is never -0.
template <typename Real>
NF_HOST_DEVICE Real relu(Real x) {
  return x <= Real{0} ? Real{0} : x;
}

// x / (1 + exp(-t)) = x * sigma(t).
template <typename Real>
NF_HOST_DEVICE Real times_sigmoid(Real x, Real t) {
  return div_rn(x, add_rn(Real{1}, exponential(-t)));
}

template <typename Real>
NF_HOST_DEVICE Real gelu_erf(Real x) {
  return mul_rn(x, distribution(x));
}

template <typename Real>
NF_HOST_DEVICE Real gelu_tanh(Real x) {
  // These are the constants of the formula, 0.7978845608 and 0.044715, the first one doubled.
  const Real cube = mul_rn(mul_rn(x, x), x);
  const Real inner = add_rn(x, mul_rn(static_cast<Real>(0.044715), cube));
  return times_sigmoid(x, mul_rn(static_cast<Real>(1.5957691216), inner));
}

template <typename Real>
NF_HOST_DEVICE Real swiglu(Real u, Real g, const ActivationParams<Real>& params) {
  const Real gate = clamp_above(g, params.limit_gate);
  const Real up = clamp_both(u, params.limit_up);
  // Adding a beta of 0 would turn -0 into +0; SwiGLU without a beta keeps -0.
  const Real shifted = params.beta == Real{0} ? up : add_rn(up, params.beta);
  return mul_rn(times_sigmoid(gate, mul_rn(params.alpha, gate)), shifted);
}

// The gate is clamped after SiLU.
template <typename Real>
NF_HOST_DEVICE Real swiglu_step(Real u, Real g, const ActivationParams<Real>& params) {
  const Real gate = clamp_above(times_sigmoid(g, g), params.limit_gate);
  return mul_rn(gate, clamp_both(u, params.limit_up));
}

template <typename Real>
NF_HOST_DEVICE Real situ_glu(Real u, Real g, const ActivationParams<Real>& params) {
  const Real gate = clamp_above(g, params.limit_gate);
  const Real up = clamp_both(u, params.limit_up);
  const Real capped_gate = mul_rn(params.alpha, tangent(div_rn(gate, params.alpha)));
  const Real capped_up = mul_rn(params.beta, tangent(div_rn(up, params.beta)));
  return mul_rn(times_sigmoid(capped_gate, gate), capped_up);
}

}  // namespace activation_detail

// h of one element. g is ignored where the activation is not gated.
template <typename Real>
NF_HOST_DEVICE Real activated(ActivationKind kind, Real u, Real g,
                              const ActivationParams<Real>& params) {
  namespace detail = activation_detail;
  switch (kind) {
    case ActivationKind::kIdentity:
      return u;
    case ActivationKind::kRelu:
      return detail::relu(u);
    case ActivationKind::kRelu2:
      return mul_rn(detail::relu(u), detail::relu(u));
    case ActivationKind::kSilu:
      return detail::times_sigmoid(u, u);
    case ActivationKind::kGeluErf:
      return detail::gelu_erf(u);
    case ActivationKind::kGeluTanh:
      return detail::gelu_tanh(u);
    case ActivationKind::kSwiglu:
      return detail::swiglu(u, g, params);
    case ActivationKind::kSwigluStep:
      return detail::swiglu_step(u, g, params);
    case ActivationKind::kGegluErf:
      return mul_rn(detail::gelu_erf(g), u);
    case ActivationKind::kGegluTanh:
      return mul_rn(detail::gelu_tanh(g), u);
    case ActivationKind::kSituGlu:
      return detail::situ_glu(u, g, params);
  }
  return u;
}

}  // namespace narrowfloat
