// The kernels of quantize_stream.cuh for nvfp4_per_token from SiLU and smoothing.
#include "ops/quantize/sm90/launch_stream.cuh"

namespace narrowfloat {

void launch_quantize_stream_token(const QuantizeProblem& problem, const QuantizeParams& params,
                                  Stream stream) {
  visit_device_math(problem.math, [&]<class Math>() {
    if (problem.source == RowSourceKind::kSmooth) {
      return launch_stream<Nvfp4PerToken, Math, StreamSmooth>(problem, params, stream);
    }
    launch_stream<Nvfp4PerToken, Math, StreamSilu<PackedBf16, Math>>(problem, params, stream);
  });
}

}  // namespace narrowfloat
