// The kernels of quantize_rows.cuh for nvfp4 with 4-over-6.
#include "ops/quantize/sm90/launch_rows.cuh"
#include "ops/quantize/sm90/quantize_rows.h"

namespace narrowfloat {

void launch_quantize_four_over_six(const QuantizeProblem& problem, const QuantizeParams& params,
                                   Stream stream) {
  visit_device_math(problem.math, [&]<class Math>() {
    visit_row_source<Math>(problem, [&]<class Source>() {
      if constexpr (kHasTwoRuns<Source>) {
        if (takes_two_runs<FourOverSixTwoRuns>(problem)) {
          return launch_quantize_rows<Nvfp4, Math, Source, FourOverSixTwoRuns>(problem, params,
                                                                               stream);
        }
      }
      launch_quantize_whole_rows<Nvfp4, Math, Source, FourOverSixRun>(problem, params, stream);
    });
  });
}

}  // namespace narrowfloat
