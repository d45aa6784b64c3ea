// The kernels of quantize_rows.cuh for norms into 4-bit formats.
#include "ops/quantize/sm90/launch_rows.cuh"
#include "ops/quantize/sm90/quantize_rows.h"

namespace narrowfloat {

void launch_quantize_norm_rows_fp4(const QuantizeProblem& problem, const QuantizeParams& params,
                                   Stream stream) {
  const auto launch_format = [&]<BlockFormat Format>() {
    visit_device_math(problem.math, [&]<class Math>() {
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
    case FormatId::kNvfp4:
      return launch_format.template operator()<Nvfp4>();
    case FormatId::kNvfp4PerToken:
      return launch_format.template operator()<Nvfp4PerToken>();
    default:
      return launch_format.template operator()<Mxfp4>();
  }
}

}  // namespace narrowfloat
