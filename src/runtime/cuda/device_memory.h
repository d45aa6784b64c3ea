// Owned GPU memory and copies of it, for data that is prepared once. All functions may synchronize
// with the device; none is for code that runs inside a captured graph. It needs no CUDA header.
#pragma once

#include <cstdint>
#include <memory>

#include "narrowfloat/tensor.h"

namespace narrowfloat {

// Allocates memory aligned to 256 bytes, with any contents; it is freed with its last owner. Null
// for 0 bytes. Throws kDevice where there is not enough.
std::shared_ptr<uint8_t> allocate_device_memory(Device device, int64_t size_bytes);

// Allocates zeroed memory of the host that the device writes to at the same address. Throws
// kDevice.
std::shared_ptr<uint8_t> allocate_mapped_memory(Device device, int64_t size_bytes);

// Copies in stream order, on one device.
void copy_on_device(void* to, const void* from, int64_t size_bytes, Device device, Stream stream);
// Both copy after the work that was queued on `stream`, and wait for the copy.
void copy_to_device(void* to, const void* host, int64_t size_bytes, Device device, Stream stream);
void copy_to_host(void* host, const void* from, int64_t size_bytes, Device device, Stream stream);
void wait_for(Device device, Stream stream);
// Waits for the work of all streams.
void wait_for_device(Device device);

}  // namespace narrowfloat
