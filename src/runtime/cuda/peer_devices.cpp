// See peer_devices.h.
#include "runtime/cuda/peer_devices.h"

#include <array>
#include <vector>

#include "base/throw_error.h"
#include "runtime/comm/phase.h"

namespace narrowfloat {
namespace {

constexpr const char* kCopyAdvice =
    "an earlier error of this process may have reached the device, or its peers are not accessible";

// "0000:3b:00.0": the same in every process of the host, which numbers of devices are not.
using BusId = std::array<char, 16>;

BusId bus_id_of(Device device) {
  cuda_device(device.index);  // Throws for a device that is not there.
  const CudaDeviceScope scope(device);
  check_peer_call(cudaFree(nullptr), "cudaFree(nullptr)", device, "the device cannot be used");
  BusId id{};
  check_peer_call(cudaDeviceGetPCIBusId(id.data(), static_cast<int>(id.size()), device.index),
                  "cudaDeviceGetPCIBusId", device, "the device has no PCI address");
  return id;
}

void check_access_to(Device device, int peer, const BusId& bus_id) {
  int index = 0;
  if (cudaDeviceGetByPCIBusId(&index, bus_id.data()) != cudaSuccess) {
    cudaGetLastError();  // This process does not see that GPU.
    return;
  }
  int can_access = 0;
  check_peer_call(cudaDeviceCanAccessPeer(&can_access, device.index, index),
                  "cudaDeviceCanAccessPeer", device, "see `nvidia-smi topo -p2p r`");
  if (can_access == 0) {
    throw_error(ErrorKind::kUnsupported,
                "{} cannot access the memory of rank {}'s GPU at {}: no peer access between them "
                "(see `nvidia-smi topo -p2p r`); use NCCL alone, transport none",
                to_string(device), peer, bus_id.data());
  }
}

}  // namespace

void check_peer_call(cudaError_t status, const char* call, Device device, const char* advice) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // Clears the error that is reported here.
  throw_error(ErrorKind::kDevice, "{} on {}: {} ({}): {}", call, to_string(device),
              cudaGetErrorString(status), cudaGetErrorName(status), advice);
}

void check_peer_access(Bootstrap& bootstrap, Device device) {
  BusId own{};
  run_phase(bootstrap, "initializing the GPU", [&] { own = bus_id_of(device); });
  const std::vector<BusId> bus_ids = gather_values(bootstrap, own);
  run_phase(bootstrap, "checking peer access", [&] {
    for (int peer = 0; peer < bootstrap.size(); ++peer) {
      const BusId& bus_id = bus_ids[static_cast<size_t>(peer)];
      if (bus_id != own) check_access_to(device, peer, bus_id);
    }
  });
}

DeviceAccess::DeviceAccess(Device device) : device_(device) {
  const CudaDeviceScope scope(device);
  check_peer_call(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
                  "cudaStreamCreateWithFlags", device, kCopyAdvice);
}

DeviceAccess::~DeviceAccess() { cudaStreamDestroy(stream_); }

void DeviceAccess::write(uint8_t* region, const void* from, size_t size_bytes) {
  copy(region, from, size_bytes);
}

void DeviceAccess::read(void* to, const uint8_t* region, size_t size_bytes) {
  copy(to, region, size_bytes);
}

void DeviceAccess::copy(void* to, const void* from, size_t size_bytes) {
  const CudaDeviceScope scope(device_);
  check_peer_call(cudaMemcpyAsync(to, from, size_bytes, cudaMemcpyDefault, stream_),
                  "cudaMemcpyAsync", device_, kCopyAdvice);
  check_peer_call(cudaStreamSynchronize(stream_), "cudaStreamSynchronize", device_, kCopyAdvice);
}

}  // namespace narrowfloat
