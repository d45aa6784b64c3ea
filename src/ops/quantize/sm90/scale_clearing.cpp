// See scale_clearing.h.
#include "ops/quantize/sm90/scale_clearing.h"

#include "runtime/cuda/launch.h"

namespace narrowfloat {

void clear_scale_tensors(const QuantizeParams& params, Stream stream) {
  for (const ScaleTensors& tensors : {params.scales, params.extra_scales}) {
    if (tensors.data == nullptr) continue;
    clear_async(tensors.data, static_cast<size_t>(params.batch * tensors.tensor_bytes), stream);
  }
}

void clear_row_scales(const QuantizeProblem& problem, const QuantizeParams& params, Stream stream) {
  const auto rows = static_cast<size_t>(problem.batch * problem.rows);
  clear_async(params.global_scale, rows * sizeof(float), stream);
}

}  // namespace narrowfloat
