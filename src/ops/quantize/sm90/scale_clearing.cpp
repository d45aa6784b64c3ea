// See scale_clearing.h.
#include "ops/quantize/sm90/scale_clearing.h"

#include "runtime/cuda/launch.h"

namespace narrowfloat {

void clear_scale_images(const QuantizeParams& params, Stream stream) {
  for (const ScaleImages& images : {params.scales, params.extra_scales}) {
    if (images.data == nullptr) continue;
    clear_async(images.data, static_cast<size_t>(params.batch * images.image_bytes), stream);
  }
}

void clear_row_scales(const QuantizeProblem& problem, const QuantizeParams& params, Stream stream) {
  const auto rows = static_cast<size_t>(problem.batch * problem.rows);
  clear_async(params.global_scale, rows * sizeof(float), stream);
}

}  // namespace narrowfloat
