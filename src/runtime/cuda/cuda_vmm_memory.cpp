// See cuda_symmetric_memory.h: make_cuda_vmm_memory(). A rank creates physical memory, exports it
// as a file descriptor, and maps the memory of all ranks into addresses that it reserves. A mapping
// keeps physical memory alive: no rank depends on the order in which others free theirs.
#include <array>
#include <cuda.h>
#include <utility>
#include <vector>

#include "base/int_math.h"
#include "base/throw_error.h"
#include "runtime/comm/descriptor_exchange.h"
#include "runtime/comm/phase.h"
#include "runtime/cuda/cuda_symmetric_memory.h"
#include "runtime/cuda/driver_function.h"
#include "runtime/cuda/peer_devices.h"

namespace narrowfloat {
namespace {

constexpr CUmemAllocationHandleType kHandleType = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
constexpr const char* kImportAdvice =
    "the GPUs need peer access to each other; transport cuda_ipc may work";

// The driver's functions, under their own names.
struct VmmFunctions {
  template <typename Function>
  struct Entry {
    explicit Entry(const char* symbol) : name(symbol), call(driver_function<Function>(symbol)) {}
    const char* name;
    Function call;
  };

  Entry<decltype(&cuGetErrorString)> error_string{"cuGetErrorString"};
  Entry<decltype(&cuDeviceGet)> device_get{"cuDeviceGet"};
  Entry<decltype(&cuDeviceGetAttribute)> device_attribute{"cuDeviceGetAttribute"};
  Entry<decltype(&cuMemGetAllocationGranularity)> granularity{"cuMemGetAllocationGranularity"};
  Entry<decltype(&cuMemCreate)> create{"cuMemCreate"};
  Entry<decltype(&cuMemRelease)> release{"cuMemRelease"};
  Entry<decltype(&cuMemExportToShareableHandle)> export_handle{"cuMemExportToShareableHandle"};
  Entry<decltype(&cuMemImportFromShareableHandle)> import_handle{"cuMemImportFromShareableHandle"};
  Entry<decltype(&cuMemAddressReserve)> reserve{"cuMemAddressReserve"};
  Entry<decltype(&cuMemAddressFree)> free_address{"cuMemAddressFree"};
  Entry<decltype(&cuMemMap)> map{"cuMemMap"};
  Entry<decltype(&cuMemUnmap)> unmap{"cuMemUnmap"};
  Entry<decltype(&cuMemSetAccess)> set_access{"cuMemSetAccess"};
};

// Throws kDevice without a driver.
const VmmFunctions& vmm() {
  static const VmmFunctions kFunctions;
  return kFunctions;
}

// Throws kDevice with the call, the device, the driver's message and `advice`.
template <typename Function, typename... Args>
void call_driver(const VmmFunctions::Entry<Function>& function, Device device, const char* advice,
                 Args... args) {
  const CUresult status = function.call(args...);
  if (status == CUDA_SUCCESS) return;
  const char* text = nullptr;
  vmm().error_string.call(status, &text);
  throw_error(ErrorKind::kDevice, "{} on {}: {} (CUDA error {}): {}", function.name,
              to_string(device), text == nullptr ? "unknown error" : text, static_cast<int>(status),
              advice);
}

// Physical memory, its own or a peer's. Mappings of it may outlive it.
class PhysicalMemory {
 public:
  PhysicalMemory() = default;
  PhysicalMemory(PhysicalMemory&& other) noexcept : handle_(std::exchange(other.handle_, 0)) {}
  PhysicalMemory& operator=(PhysicalMemory&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~PhysicalMemory() {
    if (handle_ != 0) vmm().release.call(handle_);
  }

  static PhysicalMemory create(Device device, const CUmemAllocationProp& properties,
                               int64_t bytes) {
    PhysicalMemory memory;
    call_driver(vmm().create, device, "free memory of the device, or ask for less", &memory.handle_,
                static_cast<size_t>(bytes), &properties, 0ULL);
    return memory;
  }
  static PhysicalMemory import_from(Device device, const FileDescriptor& file) {
    PhysicalMemory memory;
    // NOLINTNEXTLINE(performance-no-int-to-ptr): the driver takes descriptors as pointers
    auto* descriptor = reinterpret_cast<void*>(static_cast<uintptr_t>(file.get()));
    call_driver(vmm().import_handle, device, kImportAdvice, &memory.handle_, descriptor,
                kHandleType);
    return memory;
  }
  [[nodiscard]] FileDescriptor export_from(Device device) const {
    int descriptor = -1;
    call_driver(vmm().export_handle, device, "transport cuda_ipc may work",
                static_cast<void*>(&descriptor), handle_, kHandleType, 0ULL);
    return FileDescriptor(descriptor);
  }
  [[nodiscard]] CUmemGenericAllocationHandle handle() const { return handle_; }

 private:
  CUmemGenericAllocationHandle handle_ = 0;
};

// Addresses at which physical memory is mapped for one device.
class MappedMemory {
 public:
  MappedMemory() = default;
  MappedMemory(MappedMemory&& other) noexcept { *this = std::move(other); }
  MappedMemory& operator=(MappedMemory&& other) noexcept {
    std::swap(address_, other.address_);
    std::swap(bytes_, other.bytes_);
    std::swap(is_mapped_, other.is_mapped_);
    return *this;
  }
  ~MappedMemory() {
    if (is_mapped_) vmm().unmap.call(address_, bytes_);
    if (address_ != 0) vmm().free_address.call(address_, bytes_);
  }

  static MappedMemory map(Device device, const PhysicalMemory& memory, int64_t bytes) {
    MappedMemory mapped;
    mapped.bytes_ = static_cast<size_t>(bytes);
    call_driver(vmm().reserve, device, "the process has no addresses left", &mapped.address_,
                mapped.bytes_, size_t{0}, CUdeviceptr{0}, 0ULL);
    call_driver(vmm().map, device, kImportAdvice, mapped.address_, mapped.bytes_, size_t{0},
                memory.handle(), 0ULL);
    mapped.is_mapped_ = true;
    const CUmemAccessDesc access{
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device.index},
        .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    call_driver(vmm().set_access, device, kImportAdvice, mapped.address_, mapped.bytes_, &access,
                size_t{1});
    return mapped;
  }
  [[nodiscard]] uint8_t* data() const {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): the driver's type of device pointers is an integer
    return reinterpret_cast<uint8_t*>(address_);
  }

 private:
  CUdeviceptr address_ = 0;
  size_t bytes_ = 0;
  bool is_mapped_ = false;
};

class CudaVmmMemory final : public SymmetricMemory {
 public:
  CudaVmmMemory(int rank, Device device, int64_t size_bytes)
      : SymmetricMemory(rank, device, AllReduceTransport::kCudaVmm, size_bytes) {}
  ~CudaVmmMemory() override {
    release_on_device(device(), [this] { mapped_.clear(); });
  }

  void map(const std::vector<PhysicalMemory>& memories, const std::vector<int64_t>& sizes) {
    std::vector<uint8_t*> regions;
    for (size_t peer = 0; peer < memories.size(); ++peer) {
      mapped_.push_back(MappedMemory::map(device(), memories[peer], sizes[peer]));
      regions.push_back(mapped_.back().data());
    }
    set_regions(std::move(regions));
  }

  void unmap_peers() override {
    forget_peers();
    release_on_device(device(), [this] {
      for (size_t peer = 0; peer < mapped_.size(); ++peer) {
        if (static_cast<int>(peer) != rank()) mapped_[peer] = MappedMemory();
      }
    });
  }

 private:
  std::vector<MappedMemory> mapped_;  // In rank order, the own memory included.
};

void check_attribute(CUdevice gpu, CUdevice_attribute attribute, const char* what, Device device) {
  int value = 0;
  call_driver(vmm().device_attribute, device, "the driver does not know the attribute", &value,
              attribute, gpu);
  if (value == 0) {
    throw_error(ErrorKind::kUnsupported, "{} has no {}; transport cuda_ipc may work",
                to_string(device), what);
  }
}

CUmemAllocationProp properties_of(Device device) {
  CUdevice gpu = 0;
  call_driver(vmm().device_get, device, "there is no such device", &gpu, device.index);
  check_attribute(gpu, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                  "virtual memory management", device);
  check_attribute(gpu, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                  "memory handles that are file descriptors", device);
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = kHandleType;
  properties.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gpu};
  return properties;
}

int64_t granularity_of(Device device, const CUmemAllocationProp& properties) {
  size_t bytes = 0;
  call_driver(vmm().granularity, device, "the device cannot allocate shareable memory", &bytes,
              &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
  return static_cast<int64_t>(bytes);
}

}  // namespace

std::unique_ptr<SymmetricMemory> make_cuda_vmm_memory(Bootstrap& bootstrap, Device device,
                                                      int64_t size_bytes) {
  check_peer_access(bootstrap, device);
  const auto own = static_cast<size_t>(bootstrap.rank());
  const int64_t probed_bytes = mapped_bytes(size_bytes, kPeerMemoryUnit);
  int64_t own_bytes = 0;
  std::vector<PhysicalMemory> memories(static_cast<size_t>(bootstrap.size()));
  FileDescriptor exported;
  run_phase(bootstrap, "allocating memory for CUDA VMM", [&] {
    const CudaDeviceScope scope(device);
    const CUmemAllocationProp properties = properties_of(device);
    own_bytes = round_up(probed_bytes, granularity_of(device, properties));
    memories[own] = PhysicalMemory::create(device, properties, own_bytes);
    exported = memories[own].export_from(device);
  });
  const std::vector<int64_t> sizes = gather_values(bootstrap, own_bytes);
  const std::vector<FileDescriptor> files = exchange_descriptors(bootstrap, exported.get());
  auto memory = std::make_unique<CudaVmmMemory>(bootstrap.rank(), device, size_bytes);
  std::unique_ptr<DeviceAccess> access;
  run_phase(bootstrap, "mapping the peers' memory by CUDA VMM", [&] {
    const CudaDeviceScope scope(device);
    for (size_t peer = 0; peer < files.size(); ++peer) {
      if (peer != own) memories[peer] = PhysicalMemory::import_from(device, files[peer]);
    }
    memory->map(memories, sizes);
    access = std::make_unique<DeviceAccess>(device);
  });
  probe_regions(bootstrap, *memory, probed_bytes, *access);
  return memory;
}

}  // namespace narrowfloat
