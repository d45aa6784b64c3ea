// The kernels of quantize_stream.cuh for norms into 4-bit formats.
#include "ops/quantize/sm90/launch_stream.cuh"

namespace narrowfloat {

void launch_quantize_stream_norm_fp4(const QuantizeProblem& problem, const QuantizeParams& params,
                                     Stream stream) {
  const auto launch_format = [&]<BlockFormat Format>() {
    visit_device_math(problem.math, [&]<class Math>() {
      launch_stream<Format, Math, StreamNorm<PackedBf16>>(problem, params, stream);
    });
  };
  switch (problem.format) {
    case FormatId::kNvfp4:
      return launch_format.template operator()<Nvfp4>();
    case FormatId::kNvfp4PerToken:
      return launch_format.template operator()<Nvfp4PerToken>();
    default:
      return launch_format.template operator()<Mxfp4>();
  }
}

}  // namespace narrowfloat
