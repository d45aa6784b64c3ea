// See device_buffer.h. Stream-ordered allocations: fast enough for thousands of small cases, and
// compute-sanitizer knows their exact sizes.
#include <algorithm>
#include <cuda_runtime.h>
#include <utility>

#include "runtime/cuda/cuda_check.h"
#include "runtime/cuda/cuda_devices.h"
#include "support/device_buffer.h"

namespace narrowfloat::testing {
namespace {

constexpr uint8_t kCanary = 0xA5;
constexpr int64_t kCanaryBytes = 256;

// Freed memory stays with the process, so that the next case gets it back at once.
void keep_freed_memory(Device device) {
  cudaMemPool_t pool = nullptr;
  check_cuda(cudaDeviceGetDefaultMemPool(&pool, device.index), "cudaDeviceGetDefaultMemPool");
  uint64_t threshold = UINT64_MAX;
  check_cuda(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold),
             "cudaMemPoolSetAttribute");
}

void finish() { check_cuda(cudaStreamSynchronize(cudaStreamPerThread), "cudaStreamSynchronize"); }

void wait_for_device() { check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); }

}  // namespace

DeviceBuffer::DeviceBuffer(int64_t bytes, const DeviceBufferStyle& style)
    : device_(style.device), size_(bytes) {
  const CudaDeviceScope scope(device_);
  keep_freed_memory(device_);
  total_ = kCanaryBytes + style.offset + bytes + (style.guard_after ? kCanaryBytes : 0);
  void* memory = nullptr;
  check_cuda(cudaMallocAsync(&memory, static_cast<size_t>(total_), cudaStreamPerThread),
             "cudaMallocAsync");
  base_ = static_cast<uint8_t*>(memory);
  data_ = base_ + kCanaryBytes + style.offset;
  const auto set = [](uint8_t* first, uint8_t byte, int64_t count) {
    if (count == 0) return;
    check_cuda(cudaMemsetAsync(first, byte, static_cast<size_t>(count), cudaStreamPerThread),
               "cudaMemsetAsync");
  };
  set(base_, kCanary, data_ - base_);
  set(data_ + size_, kCanary, base_ + total_ - (data_ + size_));
  if (style.is_initialized) set(data_, style.poison, size_);
  finish();
}

DeviceBuffer::~DeviceBuffer() { release(); }

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  if (this == &other) return *this;
  release();
  device_ = other.device_;
  base_ = std::exchange(other.base_, nullptr);
  data_ = std::exchange(other.data_, nullptr);
  size_ = std::exchange(other.size_, 0);
  total_ = other.total_;
  return *this;
}

// Freed in no order with other streams: their work must be done. Errors are for the next call.
void DeviceBuffer::release() {
  if (base_ == nullptr) return;
  const CudaDeviceScope scope(device_);
  cudaDeviceSynchronize();
  cudaFreeAsync(base_, cudaStreamPerThread);
  base_ = nullptr;
}

void DeviceBuffer::write(const void* host, int64_t bytes, int64_t at) const {
  const CudaDeviceScope scope(device_);
  wait_for_device();
  if (bytes == 0) return;
  check_cuda(cudaMemcpyAsync(data_ + at, host, static_cast<size_t>(bytes), cudaMemcpyHostToDevice,
                             cudaStreamPerThread),
             "cudaMemcpyAsync");
  finish();
}

void DeviceBuffer::read(void* host, int64_t bytes, int64_t at) const {
  const CudaDeviceScope scope(device_);
  wait_for_device();
  if (bytes == 0) return;
  check_cuda(cudaMemcpyAsync(host, data_ + at, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost,
                             cudaStreamPerThread),
             "cudaMemcpyAsync");
  finish();
}

std::vector<uint8_t> DeviceBuffer::copy() const {
  std::vector<uint8_t> bytes(static_cast<size_t>(size_));
  read(bytes.data(), size_);
  return bytes;
}

void DeviceBuffer::fill(uint8_t byte) const {
  const CudaDeviceScope scope(device_);
  wait_for_device();
  if (size_ == 0) return;
  check_cuda(cudaMemsetAsync(data_, byte, static_cast<size_t>(size_), cudaStreamPerThread),
             "cudaMemsetAsync");
  finish();
}

bool DeviceBuffer::intact(void* host) const {
  if (base_ == nullptr) return true;
  const int64_t front = data_ - base_;
  const int64_t back = total_ - front - size_;
  const auto stands = [](uint8_t byte) { return byte == kCanary; };
  if (host == nullptr) {
    std::vector<uint8_t> canaries(static_cast<size_t>(front + back));
    read(canaries.data(), front, -front);
    read(canaries.data() + front, back, size_);
    return std::all_of(canaries.begin(), canaries.end(), stands);
  }
  std::vector<uint8_t> all(static_cast<size_t>(total_));
  read(all.data(), total_, -front);
  std::copy_n(all.begin() + front, size_, static_cast<uint8_t*>(host));
  return std::all_of(all.begin(), all.begin() + front, stands) &&
         std::all_of(all.end() - back, all.end(), stands);
}

}  // namespace narrowfloat::testing
