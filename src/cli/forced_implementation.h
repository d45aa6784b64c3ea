// Pins an operation to one implementation for a while: what results are compared with.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace narrowfloat::cli {

// While it lives, `op` runs on `implementation` and other operations on what they choose
// themselves. The library reads the variable behind it on every call.
class ForcedImplementation {
 public:
  ForcedImplementation(std::string_view op, std::string_view implementation);
  ~ForcedImplementation();
  ForcedImplementation(const ForcedImplementation&) = delete;
  ForcedImplementation& operator=(const ForcedImplementation&) = delete;

 private:
  std::optional<std::string> previous_;
};

}  // namespace narrowfloat::cli
