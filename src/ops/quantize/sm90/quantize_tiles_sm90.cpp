// sm90_tiles: FP8 with 128x128 blocks, from every source. One launch; norms take two, as a tile
// needs the statistics of 128 whole rows.
#include "ops/quantize/sm90/quantize_tiles.h"

#include "ops/quantize/quantize_impls.h"
#include "ops/quantize/sm90/quantize_rows.h"
#include "ops/quantize/sm90/scale_clearing.h"
#include "runtime/cuda/cuda_devices.h"

namespace narrowfloat {
namespace {

Support supports(const QuantizeProblem& problem) {
  if (problem.format != FormatId::kFp8Block128x128) return Support::no("only for 128x128 blocks");
  if (is_norm(problem.source)) {
    const Support norm = norm_extents(problem);
    if (!norm.ok()) return norm;
  }
  const Support tiles = tile_extents(problem);
  return tiles.ok() ? sm90_extents(problem) : tiles;
}

void run(const QuantizeProblem& problem, const QuantizeArgs& args, Stream stream) {
  const CudaDeviceScope scope(problem.device);
  if (problem.batch * problem.rows * problem.cols == 0) return;
  QuantizeParams params = make_quantize_params(problem, args);
  if (is_norm(problem.source)) {
    launch_prepare_norm_rows(problem, params, {.stores_reciprocal_rms = true}, stream);
    params = after_prepare_norm_rows(params);
  }
  launch_quantize_tiles(problem, params, stream);
}

}  // namespace

const QuantizeImpl kQuantizeSm90Tiles{"sm90_tiles", on_own_code<supports>, run};
const QuantizeImpl kQuantizeSm80Tiles{"sm80_tiles", on_portable_code<supports>, run};

}  // namespace narrowfloat
