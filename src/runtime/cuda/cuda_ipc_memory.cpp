// See cuda_symmetric_memory.h: make_cuda_ipc_memory().
#include <cuda_runtime_api.h>
#include <vector>

#include "base/throw_error.h"
#include "runtime/comm/phase.h"
#include "runtime/cuda/cuda_symmetric_memory.h"
#include "runtime/cuda/device_memory.h"
#include "runtime/cuda/peer_devices.h"

namespace narrowfloat {
namespace {

class CudaIpcMemory final : public SymmetricMemory {
 public:
  CudaIpcMemory(int rank, Device device, int64_t size_bytes)
      : SymmetricMemory(rank, device, AllReduceTransport::kCudaIpc, size_bytes) {}
  ~CudaIpcMemory() override { CudaIpcMemory::unmap_peers(); }

  void allocate(int64_t bytes) { own_ = allocate_device_memory(device(), bytes); }

  [[nodiscard]] cudaIpcMemHandle_t handle() const {
    const CudaDeviceScope scope(device());
    cudaIpcMemHandle_t handle{};
    check_peer_call(cudaIpcGetMemHandle(&handle, own_.get()), "cudaIpcGetMemHandle", device(),
                    "the platform has no CUDA IPC; transport cuda_vmm may work");
    return handle;
  }

  void open(const std::vector<cudaIpcMemHandle_t>& handles) {
    const CudaDeviceScope scope(device());
    opened_.assign(handles.size(), nullptr);
    std::vector<uint8_t*> regions(handles.size(), own_.get());
    for (size_t peer = 0; peer < handles.size(); ++peer) {
      if (static_cast<int>(peer) == rank()) continue;
      check_peer_call(
          cudaIpcOpenMemHandle(&opened_[peer], handles[peer], cudaIpcMemLazyEnablePeerAccess),
          "cudaIpcOpenMemHandle", device(),
          "ranks have to be processes of one host (containers: of one IPC namespace), with peer "
          "access between their GPUs; transport cuda_vmm may work");
      regions[peer] = static_cast<uint8_t*>(opened_[peer]);
    }
    set_regions(std::move(regions));
  }

  void unmap_peers() override {
    forget_peers();
    if (opened_.empty()) return;
    release_on_device(device(), [this] {
      for (void* peer : opened_) {
        if (peer != nullptr) cudaIpcCloseMemHandle(peer);
      }
    });
    opened_.clear();
  }

 private:
  std::shared_ptr<uint8_t> own_;
  std::vector<void*> opened_;
};

}  // namespace

std::unique_ptr<SymmetricMemory> make_cuda_ipc_memory(Bootstrap& bootstrap, Device device,
                                                      int64_t size_bytes) {
  check_peer_access(bootstrap, device);
  auto memory = std::make_unique<CudaIpcMemory>(bootstrap.rank(), device, size_bytes);
  const int64_t bytes = mapped_bytes(size_bytes, kPeerMemoryUnit);
  cudaIpcMemHandle_t handle{};
  run_phase(bootstrap, "allocating memory for CUDA IPC", [&] {
    memory->allocate(bytes);
    handle = memory->handle();
  });
  const std::vector<cudaIpcMemHandle_t> handles = gather_values(bootstrap, handle);
  try {
    std::unique_ptr<DeviceAccess> access;
    run_phase(bootstrap, "opening the peers' memory by CUDA IPC", [&] {
      memory->open(handles);
      access = std::make_unique<DeviceAccess>(device);
    });
    probe_regions(bootstrap, *memory, bytes, *access);
  } catch (const PhaseError&) {
    // No rank frees memory that another one has open.
    memory->unmap_peers();
    bootstrap.barrier();
    throw;
  }
  return memory;
}

}  // namespace narrowfloat
