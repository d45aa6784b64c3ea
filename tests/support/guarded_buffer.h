// Memory that notices who writes or reads outside it.
//
//   kCanary   [canary][data][canary]          intact() tells whether the canaries still stand
//   kPage     [canary][data]|unreadable page  the first byte after the data faults at once
//
// Data starts out as one poison byte repeated, so that two runs with different poison tell which
// bytes an operation left alone.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace narrowfloat::testing {

enum class Guard { kCanary, kPage };

struct BufferStyle {
  uint8_t poison = 0xCC;
  Guard guard = Guard::kCanary;
  int64_t misalignment = 0;  // Misalignment of the first byte, modulo 64; kCanary only.
};

class GuardedBuffer {
 public:
  GuardedBuffer() = default;
  GuardedBuffer(int64_t bytes, const BufferStyle& style);
  ~GuardedBuffer();
  GuardedBuffer(GuardedBuffer&& other) noexcept;
  GuardedBuffer& operator=(GuardedBuffer&& other) noexcept;
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;

  template <typename T = uint8_t>
  [[nodiscard]] T* data() const {
    return reinterpret_cast<T*>(data_);
  }
  template <typename T = uint8_t>
  [[nodiscard]] std::span<T> span() const {
    return {data<T>(), static_cast<size_t>(size_) / sizeof(T)};
  }
  [[nodiscard]] int64_t size() const { return size_; }
  [[nodiscard]] Guard guard() const { return guard_; }
  [[nodiscard]] std::vector<uint8_t> copy() const { return {data_, data_ + size_}; }
  [[nodiscard]] bool intact() const;

 private:
  void release();
  [[nodiscard]] std::span<uint8_t> front() const;
  [[nodiscard]] std::span<uint8_t> back() const;

  uint8_t* data_ = nullptr;
  int64_t size_ = 0;
  uint8_t* base_ = nullptr;
  int64_t total_ = 0;
  Guard guard_ = Guard::kCanary;
};

// A line that is printed if the process dies of a fault: what was running. Keeps a copy.
void set_crash_note(const char* note);

}  // namespace narrowfloat::testing
