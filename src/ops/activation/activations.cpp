// The table of activations, the factories, and the legal values of each activation's parameters.
#include <array>
#include <cmath>

#include "base/name_table.h"
#include "base/throw_error.h"
#include "narrowfloat/activation.h"
#include "tensor/view_checks.h"

namespace narrowfloat {
namespace {

using Kind = ActivationKind;

// The entries are in the order of ActivationKind.
constexpr std::array kActivations{
    ActivationInfo{Kind::kIdentity, "identity", "u", false, false, false, false},
    ActivationInfo{Kind::kRelu, "relu", "max(u, 0)", false, false, false, false},
    ActivationInfo{Kind::kRelu2, "relu2", "max(u, 0)^2", false, false, false, false},
    ActivationInfo{Kind::kSilu, "silu", "u * sigma(u)", false, false, false, false},
    ActivationInfo{Kind::kGeluErf, "gelu_erf", "0.5 * u * (1 + erf(u / sqrt 2))", false, false,
                   false, false},
    ActivationInfo{Kind::kGeluTanh, "gelu_tanh",
                   "0.5 * u * (1 + tanh(0.7978845608 * (u + 0.044715 * u^3)))", false, false, false,
                   false},
    ActivationInfo{Kind::kSwiglu, "swiglu",
                   "u' = clamp(u, +-limit_up), g' = min(g, limit_gate): "
                   "g' * sigma(alpha * g') * (u' + beta)",
                   true, true, true, true},
    ActivationInfo{Kind::kSwigluStep, "swiglu_step",
                   "min(g * sigma(g), limit_gate) * clamp(u, +-limit_up)", true, false, false,
                   true},
    ActivationInfo{Kind::kGegluErf, "geglu_erf", "gelu_erf(g) * u", true, false, false, false},
    ActivationInfo{Kind::kGegluTanh, "geglu_tanh", "gelu_tanh(g) * u", true, false, false, false},
    ActivationInfo{Kind::kSituGlu, "situ_glu",
                   "u' and g' clamped as in swiglu: "
                   "beta * tanh(u' / beta) * alpha * tanh(g' / alpha) * sigma(g')",
                   true, true, true, true},
};

void require_unused(std::string_view argument, bool is_read, const PerExpert& given,
                    float default_value, const ActivationInfo& info) {
  if (is_read || (given.values.is_absent() && given.value == default_value)) return;
  throw_invalid("{}: {} does not read it; leave it at {}", argument, info.name, default_value);
}

void require_number(std::string_view argument, bool is_legal, const PerExpert& given,
                    std::string_view expected) {
  // Values per expert may be in device memory, where they are not validated.
  if (!given.values.is_absent() || is_legal) return;
  throw_invalid("{}: expected {}, got {}", argument, expected, given.value);
}

}  // namespace

std::span<const ActivationInfo> all_activations() { return kActivations; }
const ActivationInfo& activation_info(ActivationKind kind) {
  return record_of(kActivations, kind, "activation");
}
std::string_view name(ActivationKind kind) { return activation_info(kind).name; }
ActivationKind parse_activation(std::string_view text) {
  return parse_name(kActivations, text, "activation");
}

Activation Activation::swiglu_oai(float alpha, float beta, float limit) {
  return {
      .kind = Kind::kSwiglu, .alpha = alpha, .beta = beta, .limit_gate = limit, .limit_up = limit};
}
Activation Activation::swiglu_step(float limit) {
  return {.kind = Kind::kSwigluStep, .limit_gate = limit, .limit_up = limit};
}
Activation Activation::situ(float gate_scale, float up_scale) {
  return {.kind = Kind::kSituGlu, .alpha = gate_scale, .beta = up_scale};
}
Activation Activation::plain(ActivationKind kind) { return {.kind = kind}; }

void check_activation(const Activation& activation) {
  const ActivationInfo& info = activation_info(activation.kind);
  const auto& [kind, alpha, beta, limit_gate, limit_up] = activation;
  require_unused("activation.alpha", info.has_alpha, alpha, 1.0F, info);
  require_unused("activation.beta", info.has_beta, beta, 0.0F, info);
  require_unused("activation.limit_gate", info.has_limits, limit_gate, Activation::kNoLimit, info);
  require_unused("activation.limit_up", info.has_limits, limit_up, Activation::kNoLimit, info);
  require_number("activation.limit_gate", limit_gate.value >= 0.0F, limit_gate,
                 "a limit >= 0 (infinity: none)");
  require_number("activation.limit_up", limit_up.value >= 0.0F, limit_up,
                 "a limit >= 0 (infinity: none)");
  const bool is_situ = kind == Kind::kSituGlu;
  const std::string_view expected = is_situ ? "a finite tanh scale > 0" : "a finite value";
  require_number("activation.alpha", std::isfinite(alpha.value) && (!is_situ || alpha.value > 0.0F),
                 alpha, expected);
  require_number("activation.beta", std::isfinite(beta.value) && (!is_situ || beta.value > 0.0F),
                 beta, expected);
}

}  // namespace narrowfloat
