// Kernels with one fault each, which one of compute-sanitizer's tools must find: tools/gpu_check.sh
// runs them to show that its clean reports mean something. No test: it fails on purpose.
//
//     sanitizer_faults out_of_bounds | uninitialized | race | barrier
//
// And two kernels without a fault, for what racecheck makes of a stage that is handed back through
// a barrier: by all lanes that read it, or by one for its warp, as in the grouped GEMM.
//
//     sanitizer_faults hand_over_by_lanes | hand_over_by_warp
#include <cstdio>
#include <cstring>
#include <cuda_runtime.h>

#include "base/host_device.h"
#include "device/ptx/async_copy.cuh"
#include "device/ring.cuh"

namespace narrowfloat {
namespace {

constexpr int kThreads = 64;

// memcheck: the last thread reads beyond the end.
__global__ void read_out_of_bounds_kernel(const int* input, int* output) {
  output[threadIdx.x] = input[threadIdx.x + 1];
}

// initcheck: nobody has written the input.
__global__ void read_uninitialized_kernel(const int* input, int* output) {
  output[threadIdx.x] = input[threadIdx.x];
}

// racecheck: no barrier between the store and the load of what another warp stored.
__global__ void race_kernel(const int* /*input*/, int* output) {
  __shared__ int shared_values[kThreads];
  shared_values[threadIdx.x] = static_cast<int>(threadIdx.x);
  output[threadIdx.x] = shared_values[(threadIdx.x + kThreads / 2) % kThreads];
}

// synccheck: one thread more than the mask names comes to the barrier.
__global__ void misuse_barrier_kernel(const int* /*input*/, int* output) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const unsigned mask = __ballot_sync(0xFFFFFFFFU, lane < 16);
  if (lane <= 16) __syncwarp(mask);
  output[threadIdx.x] = lane;
}

// The first warp copies into a stage again and again, the second adds up what it reads there. A
// copy begins once the readers have arrived; with one arrival a warp, its lanes meet at __syncwarp
// first.
template <bool kIsByWarp>
__global__ void hand_over_kernel(const int* input, int* output) {
  if constexpr (kHasWgmma) {
    constexpr uint32_t kBytes = 32 * sizeof(int);
    constexpr int kRounds = 4;
    __shared__ __align__(128) int shared_stage[32];
    __shared__ RingBarriers<1> shared_barriers;
    const Ring<1> ring(shared_barriers);
    if (threadIdx.x == 0) ring.init(1, kIsByWarp ? 1 : 32);
    __syncthreads();
    RingPosition<1> at;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int sum = 0;
    for (int round = 0; round < kRounds; ++round, at.advance()) {
      if (threadIdx.x < 32) {
        if (lane != 0) continue;
        ring.wait_empty(at);
        arrive_and_expect(ring.full(at), kBytes);
        copy_bulk(shared_address(shared_stage), input, kBytes, ring.full(at));
        continue;
      }
      ring.wait_full(at);
      sum += shared_stage[lane];
      __syncwarp();
      if (!kIsByWarp || lane == 0) ring.release(at);
    }
    output[threadIdx.x] = sum;
  }
}

struct Fault {
  const char* name;
  void (*kernel)(const int*, int*);
  bool is_input_written;
};
constexpr Fault kFaults[] = {
    {"out_of_bounds", read_out_of_bounds_kernel, true},
    {"uninitialized", read_uninitialized_kernel, false},
    {"race", race_kernel, true},
    {"barrier", misuse_barrier_kernel, true},
    {"hand_over_by_lanes", hand_over_kernel<false>, true},
    {"hand_over_by_warp", hand_over_kernel<true>, true},
};

cudaError_t run(const Fault& fault) {
  constexpr size_t kBytes = kThreads * sizeof(int);
  int* input = nullptr;
  int* output = nullptr;
  cudaError_t status = cudaMalloc(&input, kBytes);
  if (status == cudaSuccess) status = cudaMalloc(&output, kBytes);
  if (status == cudaSuccess && fault.is_input_written) status = cudaMemset(input, 0, kBytes);
  if (status == cudaSuccess) {
    fault.kernel<<<1, kThreads>>>(input, output);
    status = cudaDeviceSynchronize();
  }
  cudaFree(input);
  cudaFree(output);
  return status;
}

}  // namespace
}  // namespace narrowfloat

int main(int argc, char** argv) {
  using narrowfloat::kFaults;
  for (const auto& fault : kFaults) {
    if (argc != 2 || std::strcmp(argv[1], fault.name) != 0) continue;
    const cudaError_t status = narrowfloat::run(fault);
    std::printf("%s: %s\n", fault.name, cudaGetErrorString(status));
    return status == cudaSuccess ? 0 : 1;
  }
  std::puts(
      "expected out_of_bounds, uninitialized, race, barrier or hand_over_by_lanes or _by_warp");
  return 2;
}
