// See scale_inversion.h: checks, the list, and the implementation for the CPU.
#include "ops/quantize/scale_inversion.h"

#include <array>

#include <fmt/format.h>

#include "base/host_device.h"
#include "runtime/dispatch.h"
#include "tensor/view_checks.h"

namespace narrowfloat {
namespace {

void run_on_cpu(const ScaleInversionProblem& problem, const float* decode, float* encode, Stream) {
  for (int64_t i = 0; i < problem.count; ++i) {
    encode[i] = canonical_nan(encode_scale_from_decode(decode[i], problem.math));
  }
}

const ScaleInversionImpl kScaleInversionCpu{
    "cpu_reference", [](const ScaleInversionProblem& problem) { return cpu_only(problem.device); },
    run_on_cpu};

}  // namespace

std::string to_string(const ScaleInversionProblem& problem) {
  return fmt::format("{} scales, {} on {}", problem.count, name(problem.math),
                     to_string(problem.device));
}

std::span<const ScaleInversionImpl> scale_inversion_impls() {
  static const std::array kImpls {
#if defined(NARROWFLOAT_CUDA)
    kScaleInversionSm90, kScaleInversionSm80,
#endif
        kScaleInversionCpu
  };
  return kImpls;
}

void encode_scales_from_decode(const TensorView& decode_scales, const TensorView& encode_scales,
                               MathMode math, Stream stream) {
  require_view("decode_scales", decode_scales);
  const ScaleInversionProblem problem{
      .device = decode_scales.device, .math = math, .count = decode_scales.num_elements()};
  require_vector("decode_scales", decode_scales, DType::kF32, problem.count, problem.device);
  require_vector("encode_scales", encode_scales, DType::kF32, problem.count, problem.device);
  const std::array outputs{byte_range("encode_scales", encode_scales)};
  const std::array inputs{byte_range("decode_scales", decode_scales)};
  require_disjoint(outputs, inputs);
  if (problem.count == 0) return;
  select("invert_scales", scale_inversion_impls(), problem)
      .run(problem, static_cast<const float*>(decode_scales.data),
           static_cast<float*>(encode_scales.data), stream);
}

}  // namespace narrowfloat
