// Kernel launches: every launch is checked, goes to the device and the stream of its tensors, and
// uses programmatic dependent launch where the caller's stream asks for it and the kernels have its
// instructions, which portable code has not. A launch works inside graph capture, allocates nothing
// and synchronizes with nothing.
//
// A kernel that is launched this way calls wait_for_previous_grids()
// (device/ptx/grid_dependency.cuh) before it touches memory that an earlier kernel may read or
// write. A kernel may read memory before its wait only where a KernelChain says that this memory is
// complete (kernel_chain.h).
#pragma once

#include <array>
#include <cstddef>
#include <cuda_runtime.h>
#include <type_traits>

#include "narrowfloat/tensor.h"
#include "runtime/cuda/cuda_check.h"
#include "runtime/cuda/cuda_devices.h"

namespace narrowfloat {

struct LaunchShape {
  dim3 ctas;
  dim3 threads;
  size_t shared_bytes = 0;      // Dynamic shared memory.
  unsigned cluster_ctas = 1;    // CTAs of a cluster; ctas.x is a multiple of it.
  bool is_cooperative = false;  // All CTAs are resident at once, or the launch fails.
};

inline cudaStream_t cuda_stream(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

// Launches nothing for an empty grid. The device must be current (CudaDeviceScope).
template <typename... Params>
void launch(void (*kernel)(Params...), const LaunchShape& shape, Stream stream,
            const std::type_identity_t<Params>&... args) {
  if (shape.ctas.x == 0 || shape.ctas.y == 0 || shape.ctas.z == 0) return;
  std::array<cudaLaunchAttribute, 3> attributes{};
  unsigned num_attributes = 0;
  if (stream.programmatic_launch && current_device_has_own_code()) {
    cudaLaunchAttribute& attribute = attributes[num_attributes++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster_ctas > 1) {
    cudaLaunchAttribute& attribute = attributes[num_attributes++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {shape.cluster_ctas, 1, 1};
  }
  if (shape.is_cooperative) {
    cudaLaunchAttribute& attribute = attributes[num_attributes++];
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = shape.ctas;
  config.blockDim = shape.threads;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = cuda_stream(stream);
  config.attrs = attributes.data();
  config.numAttrs = num_attributes;
  check_cuda(cudaLaunchKernelEx(&config, kernel, args...), "cudaLaunchKernelEx");
}

// Zeroes device memory in stream order.
inline void clear_async(void* data, size_t size_bytes, Stream stream) {
  if (size_bytes == 0) return;
  check_cuda(cudaMemsetAsync(data, 0, size_bytes, cuda_stream(stream)), "cudaMemsetAsync");
}

}  // namespace narrowfloat
