// See posix_shared_memory.h.
#include "runtime/comm/posix_shared_memory.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <fcntl.h>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <vector>

#include "base/throw_error.h"
#include "runtime/comm/file_descriptor.h"
#include "runtime/comm/memory_mapping.h"
#include "runtime/comm/phase.h"
#include "runtime/comm/region_probe.h"
#include "runtime/comm/system_error.h"

namespace narrowfloat {
namespace {

constexpr int64_t kPageBytes = 4096;

// The name of an object, as it travels: "/narrowfloat-" and 32 digits, ends with a zero.
using ObjectName = std::array<char, 48>;

// A shared memory object that this rank has made. Its name goes with it, or before.
class SharedObject {
 public:
  explicit SharedObject(int64_t size_bytes) : path_("/narrowfloat-" + random_name()) {
    descriptor_ = FileDescriptor(
        ::shm_open(path_.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, S_IRUSR | S_IWUSR));
    if (!descriptor_.is_open()) throw_system_error("cannot create shared memory " + path_);
    try {
      reserve(size_bytes);
    } catch (...) {
      unlink();
      throw;
    }
  }
  SharedObject(const SharedObject&) = delete;
  SharedObject& operator=(const SharedObject&) = delete;
  ~SharedObject() { unlink(); }

  void unlink() {
    if (!path_.empty()) ::shm_unlink(path_.c_str());
    path_.clear();
  }
  [[nodiscard]] ObjectName name() const {
    ObjectName name{};
    std::copy_n(path_.begin(), std::min(path_.size(), name.size() - 1), name.begin());
    return name;
  }
  [[nodiscard]] const FileDescriptor& descriptor() const { return descriptor_; }

 private:
  // Storage that is missing shows up here, and not as SIGBUS at the first access.
  void reserve(int64_t size_bytes) const {
    struct statvfs system {};
    if (::fstatvfs(descriptor_.get(), &system) != 0) throw_system_error("fstatvfs of " + path_);
    const auto free_bytes = static_cast<int64_t>(system.f_bavail * system.f_frsize);
    if (system.f_blocks > 0 && free_bytes < size_bytes) {
      throw_error(ErrorKind::kIo,
                  "shared memory: need {} bytes, the file system of shared memory has {} left "
                  "(containers: give it more with --shm-size)",
                  size_bytes, free_bytes);
    }
    int code = EINTR;
    while (code == EINTR) code = ::posix_fallocate(descriptor_.get(), 0, size_bytes);
    if (code != 0) {
      throw_system_error(fmt::format("shared memory: cannot reserve {} bytes", size_bytes), code);
    }
  }

  std::string path_;
  FileDescriptor descriptor_;
};

MemoryMapping open_peer(const ObjectName& name, int peer, int64_t size_bytes) {
  const FileDescriptor descriptor(::shm_open(name.data(), O_RDWR | O_CLOEXEC, 0));
  if (!descriptor.is_open()) {
    throw_system_error(fmt::format(
        "cannot open the shared memory {} of rank {} (ranks run as one user of one host; "
        "containers have to share their IPC namespace)",
        name.data(), peer));
  }
  struct stat status {};
  if (::fstat(descriptor.get(), &status) != 0) throw_system_error("fstat of shared memory");
  if (status.st_size != size_bytes || status.st_uid != ::geteuid()) {
    throw_error(ErrorKind::kIo, "the shared memory {} is not the one that rank {} has made",
                name.data(), peer);
  }
  return MemoryMapping::shared(descriptor, size_bytes);
}

class PosixSharedMemory final : public SymmetricMemory {
 public:
  PosixSharedMemory(int rank, Device device, int64_t size_bytes,
                    std::vector<MemoryMapping> mappings)
      : SymmetricMemory(rank, device, AllReduceTransport::kSharedMemory, size_bytes),
        mappings_(std::move(mappings)) {
    std::vector<uint8_t*> regions;
    for (const MemoryMapping& mapping : mappings_) regions.push_back(mapping.data());
    set_regions(std::move(regions));
  }

  void unmap_peers() override {
    forget_peers();
    for (int peer = 0; peer < ranks(); ++peer) {
      if (peer != rank()) mappings_[static_cast<size_t>(peer)] = MemoryMapping();
    }
  }

 private:
  std::vector<MemoryMapping> mappings_;
};

class HostAccess final : public RegionAccess {
 public:
  void write(uint8_t* region, const void* from, size_t size_bytes) override {
    std::memcpy(region, from, size_bytes);
  }
  void read(void* to, const uint8_t* region, size_t size_bytes) override {
    std::memcpy(to, region, size_bytes);
  }
};

}  // namespace

std::unique_ptr<SymmetricMemory> make_posix_shared_memory(Bootstrap& bootstrap, Device device,
                                                          int64_t size_bytes) {
  const auto own = static_cast<size_t>(bootstrap.rank());
  const int64_t bytes = mapped_bytes(size_bytes, kPageBytes);
  std::vector<MemoryMapping> mappings(static_cast<size_t>(bootstrap.size()));
  std::unique_ptr<SharedObject> object;
  ObjectName name{};
  run_phase(bootstrap, "creating shared memory", [&] {
    object = std::make_unique<SharedObject>(bytes);
    mappings[own] = MemoryMapping::shared(object->descriptor(), bytes);
    name = object->name();
  });
  const std::vector<ObjectName> names = gather_values(bootstrap, name);
  run_phase(bootstrap, "mapping the peers' shared memory", [&] {
    for (int peer = 0; peer < bootstrap.size(); ++peer) {
      const auto idx = static_cast<size_t>(peer);
      if (idx != own) mappings[idx] = open_peer(names[idx], peer, bytes);
    }
  });
  object->unlink();
  auto memory = std::make_unique<PosixSharedMemory>(bootstrap.rank(), device, size_bytes,
                                                    std::move(mappings));
  HostAccess access;
  probe_regions(bootstrap, *memory, bytes, access);
  return memory;
}

}  // namespace narrowfloat
