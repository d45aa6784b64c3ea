// See math_kernels.h. One thread per argument.
#include "base/portable_math.h"
#include "cuda/math_kernels.h"
#include "device/device_math.cuh"
#include "device/group_scale.cuh"
#include "device/sigmoid.cuh"
#include "formats/e2m1_grid.h"
#include "ops/quantize/sm90/quantize_token_dense.cuh"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/launch.h"

namespace narrowfloat::testing {
namespace {

constexpr int kMathThreads = 256;

__device__ uint32_t evaluate(UnaryFunction function, float x) {
  switch (function) {
    case UnaryFunction::kExp:
      return float_bits(exp_portable(x));
    case UnaryFunction::kTanh:
      return float_bits(tanh_portable(x));
    case UnaryFunction::kSigmoid:
      return float_bits(sigmoid_by_tanh(x));
    case UnaryFunction::kNormalCdf:
      return float_bits(normal_cdf(x));
    case UnaryFunction::kReciprocalRoot:
      return float_bits(rsqrt_rn(x));
    case UnaryFunction::kReciprocal:
      return float_bits(DeviceFastMath::rcp(x));
    case UnaryFunction::kToE4m3:
      return DeviceExactMath::encode<E4M3>(x);
    case UnaryFunction::kToE2m1:
      return DeviceExactMath::encode<E2M1>(x);
    case UnaryFunction::kNewtonReciprocal:
      return float_bits(newton_reciprocal(x));
    case UnaryFunction::kRouterSigmoid:
      return float_bits(router_sigmoid(x));
    case UnaryFunction::kE2m1Grid:
      return float_bits(round_to_e2m1_grid(x));
    case UnaryFunction::kGroupScale:
      return float_bits(quick_group_scale(x).scale.stored);
    case UnaryFunction::kGroupMultiplier:
      return float_bits(quick_group_scale(x).scale.multiplier);
  }
  return 0;
}

__device__ Nvfp4PerToken::RowScale token_scale(float row_amax, float base) {
  return token_row_scale<DeviceExactMath>(TokenBase{base, div_rn(1.0F, base)}, row_amax);
}

__device__ float evaluate(BinaryFunction function, float a, float b) {
  switch (function) {
    case BinaryFunction::kMultiply:
      return DeviceFastMath::mul(a, b);
    case BinaryFunction::kAdd:
      return DeviceFastMath::add(a, b);
    case BinaryFunction::kDivide:
      return DeviceFastMath::div(a, b);
    case BinaryFunction::kTokenEncodeScale:
      return token_scale(a, b).pair.encode;
    case BinaryFunction::kTokenDecodeScale:
      return token_scale(a, b).pair.decode;
    case BinaryFunction::kDivideByKnown:
      return divide_by_known(a, b, div_rn(1.0F, b));
  }
  return 0.0F;
}

__global__ void evaluate_range_kernel(UnaryFunction function, BitRange range, uint32_t* results) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kMathThreads + threadIdx.x;
  if (i >= range.count) return;
  results[i] =
      evaluate(function, bits_float(range.first + static_cast<uint32_t>(i) * range.stride));
}

__global__ void evaluate_pairs_kernel(BinaryFunction function, const float* a, const float* b,
                                      float* results, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kMathThreads + threadIdx.x;
  if (i < count) results[i] = evaluate(function, a[i], b[i]);
}

LaunchShape shape_of(int64_t count) {
  return {.ctas = dim3(static_cast<unsigned>((count + kMathThreads - 1) / kMathThreads)),
          .threads = dim3(kMathThreads)};
}

}  // namespace

void evaluate_on_gpu(UnaryFunction function, const BitRange& range, const DeviceBuffer& results) {
  const CudaDeviceScope scope(gpu());
  auto* words = reinterpret_cast<uint32_t*>(results.data());
  launch(evaluate_range_kernel, shape_of(range.count), {}, function, range, words);
  synchronize_device();
}

std::vector<float> evaluate_on_gpu(BinaryFunction function, std::span<const float> a,
                                   std::span<const float> b) {
  const CudaDeviceScope scope(gpu());
  const auto count = static_cast<int64_t>(a.size());
  const DeviceBuffer first(count * 4);
  const DeviceBuffer second(count * 4);
  const DeviceBuffer out(count * 4);
  first.write(a.data(), first.size());
  second.write(b.data(), second.size());
  const auto floats = [](const DeviceBuffer& buffer) {
    return reinterpret_cast<float*>(buffer.data());
  };
  launch(evaluate_pairs_kernel, shape_of(count), {}, function, floats(first), floats(second),
         floats(out), count);
  std::vector<float> results(a.size());
  out.read(results.data(), out.size());
  return results;
}

}  // namespace narrowfloat::testing
