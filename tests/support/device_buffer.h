// Device memory that notices who writes outside it: guarded_buffer.h on a GPU.
//
//   [canary][data][canary]   or, with guard_after false,   [canary][data]
//
// Without the second canary, data ends where the allocation ends, so that compute-sanitizer sees
// the first byte that is read too far. Data starts out as a repeated poison byte, or, for
// initcheck, as nothing at all. Compiles without CUDA's headers.
#pragma once

#include <cstdint>
#include <vector>

#include "support/gpu.h"

namespace narrowfloat::testing {

struct DeviceBufferStyle {
  Device device = gpu();
  uint8_t poison = 0xCC;
  int64_t offset =
      0;  // Offset of the first byte from an address that is a multiple of 256; below 256.
  bool guard_after = true;
  bool is_initialized = true;
};

class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(int64_t bytes, const DeviceBufferStyle& style = {});
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  // An address on the device.
  [[nodiscard]] uint8_t* data() const { return data_; }
  [[nodiscard]] int64_t size() const { return size_; }
  // Copies and fills wait until all earlier work of the device is done, and until they are.
  void write(const void* host, int64_t bytes, int64_t at = 0) const;
  void read(void* host, int64_t bytes, int64_t at = 0) const;
  [[nodiscard]] std::vector<uint8_t> copy() const;
  void fill(uint8_t byte) const;
  // Whether the canaries stand; with `host`, copies all data there in the same transfer.
  [[nodiscard]] bool intact(void* host = nullptr) const;

 private:
  void release();

  Device device_;
  uint8_t* base_ = nullptr;
  uint8_t* data_ = nullptr;
  int64_t size_ = 0;
  int64_t total_ = 0;
};

}  // namespace narrowfloat::testing
