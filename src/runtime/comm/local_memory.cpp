// See symmetric_memory.h: make_local_memory(), regions of ranks of one process.
#include <memory>
#include <utility>

#include "base/int_math.h"
#include "base/throw_error.h"
#include "runtime/comm/memory_mapping.h"
#include "runtime/comm/symmetric_memory.h"
#if defined(NARROWFLOAT_CUDA)
#include "runtime/cuda/device_memory.h"
#endif

namespace narrowfloat {
namespace {

// Regions begin at pages, as they do in other transports.
constexpr int64_t kRegionAlignment = 4096;

using SharedBytes = std::shared_ptr<uint8_t>;

SharedBytes allocate_local(Device device, int64_t size_bytes) {
  if (device.type == DeviceType::kCpu) {
    auto mapping = std::make_shared<MemoryMapping>(MemoryMapping::anonymous(size_bytes));
    return {mapping, mapping->data()};
  }
#if defined(NARROWFLOAT_CUDA)
  return allocate_device_memory(device, size_bytes);
#else
  throw_error(ErrorKind::kUnsupported, "{}: this build has no CUDA", to_string(device));
#endif
}

class LocalMemory final : public SymmetricMemory {
 public:
  LocalMemory(int rank, Device device, int64_t size_bytes, SharedBytes all,
              std::vector<uint8_t*> regions)
      : SymmetricMemory(rank, device,
                        device.type == DeviceType::kCpu ? AllReduceTransport::kThreads
                                                        : AllReduceTransport::kVirtual,
                        size_bytes),
        all_(std::move(all)) {
    set_regions(std::move(regions));
  }
  void unmap_peers() override { forget_peers(); }

 private:
  SharedBytes all_;
};

}  // namespace

std::vector<std::unique_ptr<SymmetricMemory>> make_local_memory(int ranks, Device device,
                                                                int64_t size_bytes) {
  check_region_size(ranks, size_bytes);
  const int64_t stride = round_up(size_bytes, kRegionAlignment);
  const std::optional<int64_t> total = checked_mul(stride, ranks);
  if (!total) {
    throw_invalid("size_bytes: {} regions of {} bytes exceed 2^63 bytes", ranks, size_bytes);
  }
  const SharedBytes all = allocate_local(device, *total);
  std::vector<uint8_t*> regions(static_cast<size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    regions[static_cast<size_t>(rank)] = all.get() + rank * stride;
  }
  std::vector<std::unique_ptr<SymmetricMemory>> memories(regions.size());
  for (int rank = 0; rank < ranks; ++rank) {
    memories[static_cast<size_t>(rank)] =
        std::make_unique<LocalMemory>(rank, device, size_bytes, all, regions);
  }
  return memories;
}

}  // namespace narrowfloat
