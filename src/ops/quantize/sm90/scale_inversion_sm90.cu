// sm90_scales: encode scales from decode scales on a GPU (scale_inversion.h), one per thread. There
// is one scale per tensor or per row, so the launch is the whole cost.
//
// Bytes per scale: 4 read, 4 written.
#include "base/int_math.h"
#include "device/device_math.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "ops/quantize/scale_inversion.h"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/fast_math.h"
#include "runtime/cuda/launch.h"

namespace narrowfloat {
namespace {

constexpr int kThreads = 128;

template <class Math>
__global__ void __launch_bounds__(kThreads)
    invert_scales_kernel(const float* decode, float* encode, const int64_t count) {
  wait_for_previous_grids();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const float scale = decode[i];
  trigger_dependent_launch();
  encode[i] = canonical_nan(Math::rcp(scale));
}

void launch_invert_scales(const ScaleInversionProblem& problem, const float* decode, float* encode,
                          Stream stream) {
  const CudaDeviceScope scope(problem.device);
  const LaunchShape shape{dim3(static_cast<unsigned>(ceil_div(problem.count, int64_t{kThreads}))),
                          dim3(kThreads)};
  if (problem.math == MathMode::kExact) {
    launch(invert_scales_kernel<DeviceExactMath>, shape, stream, decode, encode, problem.count);
  } else {
    launch(invert_scales_kernel<DeviceFastMath>, shape, stream, decode, encode, problem.count);
  }
}

Support supports(const ScaleInversionProblem& problem) {
  constexpr int64_t kMaxCount = int64_t{1} << 31;
  if (problem.count >= kMaxCount) return Support::no("2^31 scales or more");
  return problem.math == MathMode::kFast ? has_fast_math(problem.device) : Support::yes();
}

}  // namespace

const ScaleInversionImpl kScaleInversionSm90{"sm90_scales", on_own_code<supports>,
                                             launch_invert_scales};
const ScaleInversionImpl kScaleInversionSm80{"sm80_scales", on_portable_code<supports>,
                                             launch_invert_scales};

}  // namespace narrowfloat
