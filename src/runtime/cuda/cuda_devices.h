// The GPUs of this machine for host code: their properties, whether this build has code for them,
// and a scope that makes one current. It needs no CUDA header. A build without CUDA has the listing
// only, which is empty there.
#pragma once

#include <vector>

#include "narrowfloat/runtime.h"
#include "runtime/support.h"

namespace narrowfloat {

// Device properties that launches depend on.
struct CudaDevice {
  int compute_major = 0;  // 9: Hopper.
  int num_sms = 0;
  int max_shared_bytes_per_block = 0;  // After opting in.
};

// Reads the properties once per process and device. Throws kDevice where there is no such device.
const CudaDevice& cuda_device(int index);

// The condition of every CUDA implementation: the tensors are on a GPU that this build has code
// for.
Support runs_on_cuda(Device device);

std::vector<GpuInfo> list_gpus();

// Makes a device current for a scope. Launches go to the device of their tensors, whatever device
// is current in the calling thread.
class CudaDeviceScope {
 public:
  explicit CudaDeviceScope(Device device);
  ~CudaDeviceScope();
  CudaDeviceScope(const CudaDeviceScope&) = delete;
  CudaDeviceScope& operator=(const CudaDeviceScope&) = delete;

 private:
  int previous_ = -1;  // -1: nothing to restore.
};

}  // namespace narrowfloat
