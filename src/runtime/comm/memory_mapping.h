// Owned pages of this process, private or shared.
#pragma once

#include <cstdint>
#include <sys/mman.h>
#include <utility>

#include "base/throw_error.h"
#include "runtime/comm/file_descriptor.h"
#include "runtime/comm/system_error.h"

namespace narrowfloat {

class MemoryMapping {
 public:
  MemoryMapping() = default;
  // Zeros that nobody else sees. Both throw kIo.
  static MemoryMapping anonymous(int64_t size_bytes) {
    return {size_bytes, MAP_PRIVATE | MAP_ANONYMOUS, -1};
  }
  // The first bytes of a file. They stay mapped when the descriptor is closed.
  static MemoryMapping shared(const FileDescriptor& file, int64_t size_bytes) {
    return {size_bytes, MAP_SHARED, file.get()};
  }
  MemoryMapping(MemoryMapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_bytes_(other.size_bytes_) {}
  MemoryMapping& operator=(MemoryMapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_bytes_, other.size_bytes_);
    return *this;
  }
  ~MemoryMapping() {
    if (data_ != nullptr) ::munmap(data_, static_cast<size_t>(size_bytes_));
  }

  [[nodiscard]] uint8_t* data() const { return static_cast<uint8_t*>(data_); }

 private:
  MemoryMapping(int64_t size_bytes, int flags, int descriptor) : size_bytes_(size_bytes) {
    void* data = ::mmap(nullptr, static_cast<size_t>(size_bytes), PROT_READ | PROT_WRITE, flags,
                        descriptor, 0);
    if (data == MAP_FAILED) {
      throw_system_error(fmt::format("cannot map {} bytes of memory", size_bytes));
    }
    data_ = data;
  }

  void* data_ = nullptr;
  int64_t size_bytes_ = 0;
};

}  // namespace narrowfloat
