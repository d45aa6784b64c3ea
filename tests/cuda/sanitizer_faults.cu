// Kernels with one fault each, which one of compute-sanitizer's tools must find: tools/gpu_check.sh
// runs them to show that its clean reports mean something. No test: it fails on purpose.
//
//     sanitizer_faults out_of_bounds | uninitialized | race | barrier
#include <cstdio>
#include <cstring>
#include <cuda_runtime.h>

namespace {

constexpr int kThreads = 64;

// memcheck: the last thread reads behind the end.
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

int main(int argc, char** argv) {
  for (const Fault& fault : kFaults) {
    if (argc != 2 || std::strcmp(argv[1], fault.name) != 0) continue;
    const cudaError_t status = run(fault);
    std::printf("%s: %s\n", fault.name, cudaGetErrorString(status));
    return status == cudaSuccess ? 0 : 1;
  }
  std::puts("expected out_of_bounds, uninitialized, race or barrier");
  return 2;
}
