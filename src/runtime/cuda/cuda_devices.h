// The GPUs of this machine for host code: their properties, which code of this build they run, and
// a scope that makes one current. It needs no CUDA header. A build without CUDA has the listing
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
  // The GPU runs the code for exactly its architecture, with that one's own instructions. Otherwise
  // it is the portable code, or none.
  bool has_own_code = false;
};

// Reads the properties once per process and device. Throws kDevice where there is no such device.
const CudaDevice& cuda_device(int index);

// Whether tensors are on a GPU that this build has code for.
Support runs_on_cuda(Device device);
// Whether they are on a GPU that runs the code for its own architecture, or the portable code
// (decision 0039): the condition of implementations called sm90_... and sm80_....
Support runs_own_code(Device device);
Support runs_portable_code(Device device);
bool current_device_has_own_code();

// `supports` of two implementations that are the same kernels, compiled for an architecture of its
// own and portably.
template <auto kSupports, typename Problem>
Support on_own_code(const Problem& problem) {
  Support code = runs_own_code(problem.device);
  return code.ok() ? kSupports(problem) : code;
}
template <auto kSupports, typename Problem>
Support on_portable_code(const Problem& problem) {
  Support code = runs_portable_code(problem.device);
  return code.ok() ? kSupports(problem) : code;
}

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
