// See silu_kernels.h.
#include "cuda/silu_kernels.h"
#include "device/ptx/grid_dependency.cuh"
#include "device/silu.cuh"
#include "runtime/cuda/launch.h"

namespace narrowfloat::testing {
namespace {

constexpr int kThreads = 256;

template <class Math, class Half>
__global__ void silu_mul_pairs_kernel(SiluPairs pairs) {
  wait_for_previous_grids();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= pairs.count) return;
  const uint32_t gates = pairs.gates[i];
  const uint32_t ups = pairs.ups[i];
  pairs.plain_products[i] = silu_mul_plain<Math, Half>(gates, ups);
  pairs.products[i] = silu_gates_in_range<Half>(gates & 0x7FFF7FFFU)
                          ? silu_mul_in_range<Math, Half>(gates, ups)
                          : silu_mul_plain<Math, Half>(gates, ups);
}

template <class Math, class Half>
void launch_silu_mul_pairs(const SiluPairs& pairs, Stream stream) {
  const auto blocks = static_cast<unsigned>((pairs.count + kThreads - 1) / kThreads);
  launch(silu_mul_pairs_kernel<Math, Half>, {.ctas = dim3(blocks), .threads = dim3(kThreads)},
         stream, pairs);
}

}  // namespace

void silu_mul_pairs(DType half, MathMode math, const SiluPairs& pairs, Stream stream) {
  const bool is_bf16 = half == DType::kBF16;
  if (math == MathMode::kExact) {
    return is_bf16 ? launch_silu_mul_pairs<DeviceExactMath, PackedBf16>(pairs, stream)
                   : launch_silu_mul_pairs<DeviceExactMath, PackedF16>(pairs, stream);
  }
  is_bf16 ? launch_silu_mul_pairs<DeviceFastMath, PackedBf16>(pairs, stream)
          : launch_silu_mul_pairs<DeviceFastMath, PackedF16>(pairs, stream);
}

}  // namespace narrowfloat::testing
