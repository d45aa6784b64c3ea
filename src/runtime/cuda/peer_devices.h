// Functions of both transports of GPU memory: they check peer access, name a failed call, release
// without throwing, and copy for the probe. Host code only.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "narrowfloat/bootstrap.h"
#include "narrowfloat/tensor.h"
#include "runtime/comm/region_probe.h"
#include "runtime/cuda/cuda_devices.h"

namespace narrowfloat {

// Peer memory comes in pieces of 2 MiB: the driver puts smaller allocations into one block, all of
// which CUDA IPC would share.
inline constexpr int64_t kPeerMemoryUnit = int64_t{2} << 20;

// Throws kDevice with the call, the device, CUDA's message and `advice`.
void check_peer_call(cudaError_t status, const char* call, Device device, const char* advice);

// Collective: every rank's GPU must be able to access those of its peers. GPUs that this process
// does not see (CUDA_VISIBLE_DEVICES) are left to the probe. Initializes the device. Throws
// PhaseError.
void check_peer_access(Bootstrap& bootstrap, Device device);

// Releases memory of a device after its kernels have ended. Errors are ignored: a process that ends
// may have lost its device before its memory.
template <typename Release>
void release_on_device(Device device, Release release) noexcept {
  try {
    const CudaDeviceScope scope(device);
    cudaDeviceSynchronize();
    release();
  } catch (const Error&) {
  }
  cudaGetLastError();
}

// Copies on a stream of its own, so that a probe waits for nothing else.
class DeviceAccess final : public RegionAccess {
 public:
  explicit DeviceAccess(Device device);
  ~DeviceAccess() override;
  DeviceAccess(const DeviceAccess&) = delete;
  DeviceAccess& operator=(const DeviceAccess&) = delete;

  void write(uint8_t* region, const void* from, size_t size_bytes) override;
  void read(void* to, const uint8_t* region, size_t size_bytes) override;

 private:
  void copy(void* to, const void* from, size_t size_bytes);

  Device device_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace narrowfloat
