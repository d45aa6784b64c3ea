// The kernels of quantize_rows.cuh for nvfp4_per_token.
#include "ops/quantize/sm90/launch_rows.cuh"
#include "ops/quantize/sm90/quantize_rows.h"

namespace narrowfloat {
void launch_quantize_token_rows(const QuantizeProblem& problem, const QuantizeParams& params,
                                Stream stream) {
  visit_device_math(problem.math, [&]<class Math>() {
    visit_row_source<Math>(problem, [&]<class Source>() {
      if constexpr (kHasTwoRuns<Source>) {
        if (takes_two_runs<TwoRuns>(problem)) {
          return launch_quantize_rows<Nvfp4PerToken, Math, Source, TwoRuns>(problem, params,
                                                                            stream);
        }
      }
      if constexpr (!Source::kIsNorm) {
        using Tuning = std::conditional_t<kIsLarge<Source>, OneLargeRun, OneRun>;
        launch_quantize_whole_rows<Nvfp4PerToken, Math, Source, Tuning>(problem, params, stream);
      }
    });
  });
}

}  // namespace narrowfloat
