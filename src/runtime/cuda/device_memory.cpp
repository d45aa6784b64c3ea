// See device_memory.h.
#include "runtime/cuda/device_memory.h"

#include <cstring>
#include <cuda_runtime_api.h>

#include "base/throw_error.h"
#include "runtime/cuda/cuda_check.h"
#include "runtime/cuda/cuda_devices.h"

namespace narrowfloat {
namespace {

cudaStream_t handle_of(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

}  // namespace

std::shared_ptr<uint8_t> allocate_device_memory(Device device, int64_t size_bytes) {
  if (size_bytes == 0) return nullptr;
  const CudaDeviceScope scope(device);
  void* data = nullptr;
  const cudaError_t status = cudaMalloc(&data, static_cast<size_t>(size_bytes));
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // The failed call must not show up in a later check.
    throw_error(ErrorKind::kDevice, "{}: cannot allocate {} more bytes of device memory",
                to_string(device), size_bytes);
  }
  check_cuda(status, "cudaMalloc");
  // Failures are ignored: a process that ends may have lost its device before its layers.
  return {static_cast<uint8_t*>(data), [](uint8_t* memory) { cudaFree(memory); }};
}

std::shared_ptr<uint8_t> allocate_mapped_memory(Device device, int64_t size_bytes) {
  const CudaDeviceScope scope(device);
  void* data = nullptr;
  const auto size = static_cast<size_t>(size_bytes);
  check_cuda(cudaHostAlloc(&data, size, cudaHostAllocMapped | cudaHostAllocPortable),
             "cudaHostAlloc");
  std::memset(data, 0, size);
  return {static_cast<uint8_t*>(data), [](uint8_t* memory) { cudaFreeHost(memory); }};
}

void copy_on_device(void* to, const void* from, int64_t size_bytes, Device device, Stream stream) {
  if (size_bytes == 0) return;
  const CudaDeviceScope scope(device);
  check_cuda(cudaMemcpyAsync(to, from, static_cast<size_t>(size_bytes), cudaMemcpyDeviceToDevice,
                             handle_of(stream)),
             "cudaMemcpyAsync");
}

void copy_to_device(void* to, const void* host, int64_t size_bytes, Device device, Stream stream) {
  if (size_bytes > 0) {
    const CudaDeviceScope scope(device);
    check_cuda(cudaMemcpyAsync(to, host, static_cast<size_t>(size_bytes), cudaMemcpyHostToDevice,
                               handle_of(stream)),
               "cudaMemcpyAsync");
  }
  wait_for(device, stream);
}

void copy_to_host(void* host, const void* from, int64_t size_bytes, Device device, Stream stream) {
  if (size_bytes > 0) {
    const CudaDeviceScope scope(device);
    check_cuda(cudaMemcpyAsync(host, from, static_cast<size_t>(size_bytes), cudaMemcpyDeviceToHost,
                               handle_of(stream)),
               "cudaMemcpyAsync");
  }
  wait_for(device, stream);
}

void wait_for_device(Device device) {
  const CudaDeviceScope scope(device);
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

void wait_for(Device device, Stream stream) {
  const CudaDeviceScope scope(device);
  check_cuda(cudaStreamSynchronize(handle_of(stream)), "cudaStreamSynchronize");
}

}  // namespace narrowfloat
