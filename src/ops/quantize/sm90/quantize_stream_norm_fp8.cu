// The kernels of quantize_stream.cuh for norms into 8-bit formats.
#include "ops/quantize/sm90/launch_stream.cuh"

namespace narrowfloat {

void launch_quantize_stream_norm_fp8(const QuantizeProblem& problem, const QuantizeParams& params,
                                     Stream stream) {
  const auto launch_format = [&]<BlockFormat Format>() {
    visit_device_math(effective_math(problem), [&]<class Math>() {
      launch_stream<Format, Math, StreamNorm<PackedBf16>>(problem, params, stream);
    });
  };
  if (problem.format == FormatId::kMxfp8) {
    return launch_format.template operator()<Mxfp8>();
  }
  launch_format.template operator()<Fp8Block1x128>();
}

}  // namespace narrowfloat
