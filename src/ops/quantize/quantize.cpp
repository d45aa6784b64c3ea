// The public quantizers: check, select an implementation, run it.
#include "narrowfloat/quantize.h"

#include "base/throw_error.h"
#include "formats/global_scale.h"
#include "ops/quantize/quantize_checks.h"
#include "ops/quantize/quantize_problem.h"
#include "runtime/dispatch.h"
#include "runtime/float_environment.h"

namespace narrowfloat {
namespace {

void run(const QuantizeCall& call, Stream stream) {
  // Checking and lowering compute scalars too, so the environment is set before them.
  const FloatEnvironmentGuard guard;
  const LoweredQuantize lowered = lower(call);
  select("quantize", quantize_impls(), lowered.problem).run(lowered.problem, lowered.args, stream);
}

}  // namespace

void quantize(const TensorView& input, const QuantizedView& output, const QuantizeOptions& options,
              Stream stream) {
  run({.input = input, .output = output, .options = options}, stream);
}

void silu_mul_quantize(const TensorView& gate_up, const QuantizedView& output,
                       const QuantizeOptions& options, Stream stream) {
  run({.source = RowSourceKind::kSiluMul, .input = gate_up, .output = output, .options = options},
      stream);
}

void smooth_quantize(const TensorView& input, const TensorView& smooth, const QuantizedView& output,
                     const QuantizeOptions& options, Stream stream) {
  run({.source = RowSourceKind::kSmooth,
       .input = input,
       .vector = smooth,
       .output = output,
       .options = options},
      stream);
}

void rmsnorm_quantize(const TensorView& input, const TensorView& weight,
                      const QuantizedView& output, const RmsNormOptions& norm,
                      const QuantizeOptions& options, Stream stream) {
  run({.source = RowSourceKind::kRmsNorm,
       .input = input,
       .vector = weight,
       .output = output,
       .norm = norm,
       .options = options},
      stream);
}

// NOLINTNEXTLINE(readability-function-size): the operands of the operation, then three defaults.
void add_rmsnorm_quantize(const TensorView& input, const TensorView& residual,
                          const TensorView& weight, const QuantizedView& output,
                          const RmsNormOptions& norm, const QuantizeOptions& options,
                          Stream stream) {
  run({.source = RowSourceKind::kAddRmsNorm,
       .input = input,
       .vector = weight,
       .residual = residual,
       .output = output,
       .norm = norm,
       .options = options},
      stream);
}

float encode_scale_from_amax(float amax, int e4m3_max) {
  if (e4m3_max != 448 && e4m3_max != 256) {
    throw_invalid("e4m3_max: expected 448 or 256, got {}", e4m3_max);
  }
  return in_float_environment(
      [&] { return encode_scale_of_amax(amax, static_cast<float>(e4m3_max)); });
}

float decode_scale_from_encode(float encode_scale) {
  return in_float_environment([&] { return canonical_nan(div_rn(1.0F, encode_scale)); });
}

float encode_scale_from_decode(float decode_scale, MathMode math) {
  return in_float_environment([&] {
    return math == MathMode::kExact ? canonical_nan(div_rn(1.0F, decode_scale))
                                    : FastMath::rcp(decode_scale);
  });
}

}  // namespace narrowfloat
