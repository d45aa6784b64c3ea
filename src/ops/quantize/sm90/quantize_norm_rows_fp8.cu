// The kernels of quantize_rows.cuh for norms into 8-bit formats.
#include "ops/quantize/sm90/launch_rows.cuh"
#include "ops/quantize/sm90/quantize_rows.h"

namespace narrowfloat {

void launch_quantize_norm_rows_fp8(const QuantizeProblem& problem, const QuantizeParams& params,
                                   Stream stream) {
  const auto launch_format = [&]<BlockFormat Format>() {
    visit_device_math(effective_math(problem), [&]<class Math>() {
      visit_half(problem.input, [&]<class Half>() {
        if (takes_two_runs<TwoNormRuns>(problem)) {
          launch_quantize_rows<Format, Math, NormRows<Half>, TwoNormRuns>(problem, params, stream);
        } else {
          launch_quantize_whole_rows<Format, Math, NormRows<Half>, OneNormRun>(problem, params,
                                                                               stream);
        }
      });
    });
  };
  switch (problem.format) {
    case FormatId::kMxfp8:
      return launch_format.template operator()<Mxfp8>();
    case FormatId::kFp8Block1x128:
      return launch_format.template operator()<Fp8Block1x128>();
    default:
      return launch_format.template operator()<Fp8Tensor>();
  }
}

}  // namespace narrowfloat
