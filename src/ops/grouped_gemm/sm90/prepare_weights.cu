// prepare() on the GPU: weights in checkpoint order to the image of weight_units.h. A block of 128
// threads makes a unit; each thread fetches its own pairs of neighbouring columns, so that a warp
// reads 32 bytes of every row (4-bit codes), and stores 16 bytes at a time.
#include <algorithm>
#include <cuda_runtime.h>

#include "device/ptx/grid_dependency.cuh"
#include "device/vector_io.cuh"
#include "narrowfloat/error.h"
#include "ops/grouped_gemm/sm90/unit_steps.cuh"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/device_memory.h"
#include "runtime/cuda/launch.h"

namespace narrowfloat {
namespace {

template <WeightCoding kCoding>
__device__ void make_unit(const PrepareParams& params, const UnitSource<kCoding>& source) {
  if constexpr (kCoding >= WeightCoding::kMxfp4Fp8) {
    make_e2m1_rows(source);
    if (!make_group_scales(source)) *params.misfit = 1;
  } else if constexpr (code_bits_of(kCoding) == 4) {
    make_e2m1_codes(source);
    make_scales(source);
  } else if constexpr (kCoding == WeightCoding::kFp8) {
    make_panel(source);
  } else {
    make_wide_codes(source);
  }
  if constexpr (kCoding == WeightCoding::kMxfp8) make_scales(source);
  if constexpr (kCoding == WeightCoding::kFp8) {
    const float scale = source.load_grid_scale();
    if (threadIdx.x == 0) {
      store(source.unit() + unit_code_bytes(kCoding), float4{scale, scale, scale, scale});
    }
  }
}

template <WeightCoding kCoding>
__global__ void __launch_bounds__(kPrepareThreads)
    make_units_kernel(const __grid_constant__ PrepareParams params) {
  wait_for_previous_grids();
  for (int64_t index = blockIdx.x; index < params.num_units; index += gridDim.x) {
    make_unit(params, UnitSource<kCoding>(params, index));
  }
}

template <WeightCoding kCoding>
void launch_make_units(const PrepareParams& params, Stream stream) {
  constexpr int64_t kMaxBlocks = 1 << 20;
  const auto blocks = static_cast<unsigned>(std::min(params.num_units, kMaxBlocks));
  launch(make_units_kernel<kCoding>, {dim3(blocks), dim3(kPrepareThreads)}, stream, params);
}

void launch_make_units(WeightCoding coding, const PrepareParams& params, Stream stream) {
  switch (coding) {
    case WeightCoding::kBf16:
      return launch_make_units<WeightCoding::kBf16>(params, stream);
    case WeightCoding::kFp8:
      return launch_make_units<WeightCoding::kFp8>(params, stream);
    case WeightCoding::kMxfp8:
      return launch_make_units<WeightCoding::kMxfp8>(params, stream);
    case WeightCoding::kMxfp4:
      return launch_make_units<WeightCoding::kMxfp4>(params, stream);
    case WeightCoding::kNvfp4:
      return launch_make_units<WeightCoding::kNvfp4>(params, stream);
    case WeightCoding::kNvfp4Rounded:
      return launch_make_units<WeightCoding::kNvfp4Rounded>(params, stream);
    case WeightCoding::kMxfp4Fp8:
      return launch_make_units<WeightCoding::kMxfp4Fp8>(params, stream);
    case WeightCoding::kNvfp4Fp8:
      return launch_make_units<WeightCoding::kNvfp4Fp8>(params, stream);
  }
}

// Waits until the image is made: later launches may read it on any stream. An empty image if the
// weights do not fit the coding.
WeightImage make_image(const GroupedGemmProblem& problem, const WeightSource& source,
                       WeightCoding coding, Stream stream) {
  const UnitGrid grid(problem, coding);
  const int64_t size_bytes = problem.experts * grid.blocks * grid.block_bytes();
  const auto image = allocate_device_memory(problem.device, size_bytes);
  const auto misfit = allocate_device_memory(problem.device, sizeof(int32_t));
  PrepareParams params{.codes = source.values,
                       .image = image.get(),
                       .rows = problem.rows,
                       .cols = problem.cols,
                       .blocks = grid.blocks,
                       .units = grid.units,
                       .num_units = problem.experts * grid.blocks * grid.units};
  if (source.scales.data != nullptr) {
    params.scales = static_cast<const uint8_t*>(source.scales.data);
    params.layout = source.scales.layout;
    params.scale_extents = {source.scales.rows, source.scales.blocks};
    params.scale_image = source.scales.capacity / source.scales.batch;
  }
  params.misfit = reinterpret_cast<int32_t*>(misfit.get());
  clear_async(params.misfit, sizeof(int32_t), stream);
  launch_make_units(coding, params, stream);
  int32_t has_misfit = 0;
  copy_to_host(&has_misfit, params.misfit, sizeof(int32_t), problem.device, stream);
  if (has_misfit != 0) return {};
  return {.bytes = image, .size_bytes = size_bytes, .form = static_cast<int>(coding)};
}

}  // namespace

WeightImage make_unit_image(const GroupedGemmProblem& problem, const WeightSource& source,
                            Stream stream) {
  const CudaDeviceScope scope(problem.device);
  WeightImage image = make_image(problem, source, coding_of(problem.mode), stream);
  if (image.bytes != nullptr) return image;
  return make_image(problem, source, wide_coding(coding_of(problem.mode)), stream);
}

}  // namespace narrowfloat
