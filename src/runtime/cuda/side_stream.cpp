// See side_stream.h.
#include "runtime/cuda/side_stream.h"

#include <cuda_runtime_api.h>

#include "runtime/cuda/cuda_check.h"
#include "runtime/cuda/cuda_devices.h"

namespace narrowfloat {

SideStream::SideStream(Device device) : device_(device) {
  const CudaDeviceScope scope(device);
  check_cuda(cudaStreamCreateWithFlags(&side_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  check_cuda(cudaEventCreateWithFlags(&forked_, cudaEventDisableTiming),
             "cudaEventCreateWithFlags");
  check_cuda(cudaEventCreateWithFlags(&joined_, cudaEventDisableTiming),
             "cudaEventCreateWithFlags");
}

SideStream::~SideStream() {
  cudaEventDestroy(joined_);
  cudaEventDestroy(forked_);
  cudaStreamDestroy(side_);
}

Stream SideStream::fork(Stream stream) const {
  const CudaDeviceScope scope(device_);
  check_cuda(cudaEventRecord(forked_, static_cast<cudaStream_t>(stream.handle)), "cudaEventRecord");
  check_cuda(cudaStreamWaitEvent(side_, forked_), "cudaStreamWaitEvent");
  return {side_};
}

void SideStream::join(Stream stream) const {
  const CudaDeviceScope scope(device_);
  check_cuda(cudaEventRecord(joined_, side_), "cudaEventRecord");
  check_cuda(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream.handle), joined_),
             "cudaStreamWaitEvent");
}

}  // namespace narrowfloat
