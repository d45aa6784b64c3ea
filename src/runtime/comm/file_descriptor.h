// An owned file descriptor: it is closed with its owner.
#pragma once

#include <unistd.h>
#include <utility>

namespace narrowfloat {

class FileDescriptor {
 public:
  FileDescriptor() = default;
  // Takes what open() and its like return; -1: none.
  explicit FileDescriptor(int value) : value_(value) {}
  FileDescriptor(FileDescriptor&& other) noexcept : value_(std::exchange(other.value_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(value_, other.value_);
    return *this;
  }
  ~FileDescriptor() {
    if (value_ >= 0) ::close(value_);
  }

  [[nodiscard]] int get() const { return value_; }
  [[nodiscard]] bool is_open() const { return value_ >= 0; }

 private:
  int value_ = -1;
};

}  // namespace narrowfloat
