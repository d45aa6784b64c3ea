// Whether an implementation takes a problem. It is separate from dispatch.h because problem headers
// need only this and are shared with CUDA code, where fmt does not compile.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "narrowfloat/tensor.h"

namespace narrowfloat {

// Yes, or no with the missing condition. A reason that is a literal allocates nothing: every call
// asks implementations until one says yes.
class Support {
 public:
  static Support yes() { return {}; }
  static Support no(const char* literal) {
    Support support;
    support.literal_ = literal;
    return support;
  }
  static Support no(std::string reason) {
    Support support;
    support.text_ = std::move(reason);
    return support;
  }
  [[nodiscard]] bool ok() const { return literal_ == nullptr && !text_; }
  [[nodiscard]] std::string_view reason() const {
    if (text_) return *text_;
    return literal_ == nullptr ? std::string_view{} : literal_;
  }

 private:
  const char* literal_ = nullptr;
  std::optional<std::string> text_;
};

// The condition of every CPU implementation.
inline Support cpu_only(Device device) {
  return device.type == DeviceType::kCpu ? Support::yes() : Support::no("runs on the CPU only");
}

}  // namespace narrowfloat
