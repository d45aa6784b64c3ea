// Memory on a GPU with an owner, and copies of it: for what is prepared once. All of it may wait
// for the device; nothing here is for code that runs inside a captured graph. Needs no CUDA header.
#pragma once

#include <cstdint>
#include <memory>

#include "narrowfloat/tensor.h"

namespace narrowfloat {

// Aligned to 256 bytes, any contents; freed with its last owner. Null for 0 bytes. Throws kDevice
// where there is not enough.
std::shared_ptr<uint8_t> allocate_device_memory(Device device, int64_t size_bytes);

// In stream order, on one device.
void copy_on_device(void* to, const void* from, int64_t size_bytes, Device device, Stream stream);
// After the work that was queued on `stream`; both wait for it.
void copy_to_device(void* to, const void* host, int64_t size_bytes, Device device, Stream stream);
void copy_to_host(void* host, const void* from, int64_t size_bytes, Device device, Stream stream);
void wait_for(Device device, Stream stream);

}  // namespace narrowfloat
