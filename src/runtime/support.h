// Whether an implementation takes a problem. Apart from dispatch.h because problem headers need no
// more than this and are shared with CUDA code, where fmt does not compile.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "narrowfloat/tensor.h"

namespace narrowfloat {

// Yes, or no with the missing condition.
class Support {
 public:
  static Support yes() { return {}; }
  static Support no(std::string reason) {
    Support support;
    support.reason_ = std::move(reason);
    return support;
  }
  [[nodiscard]] bool ok() const { return !reason_.has_value(); }
  [[nodiscard]] const std::string& reason() const { return *reason_; }

 private:
  std::optional<std::string> reason_;
};

// The condition of every CPU implementation.
inline Support cpu_only(Device device) {
  return device.type == DeviceType::kCpu ? Support::yes() : Support::no("runs on the CPU only");
}

}  // namespace narrowfloat
