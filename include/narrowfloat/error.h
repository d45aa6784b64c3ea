// The one exception type of the library. Every message says what was wrong, where, what was
// expected, what came, and how to fix it; the kind says who has to act.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

#include "narrowfloat/export.h"

namespace narrowfloat {

enum class ErrorKind : int {
  kInvalidArgument = 1,  // The caller passed something that can never work.
  kUnsupported = 2,      // A valid request that no implementation on this machine can do.
  kCorruptData = 3,      // A file or buffer breaks the rules of its format.
  kIo = 4,               // The operating system refused: missing file, full disk, permission.
  kDevice = 5,           // A device fault, or a bug of the library.
};

NARROWFLOAT_API std::string_view to_string(ErrorKind kind);

class NARROWFLOAT_API Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  [[nodiscard]] ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

}  // namespace narrowfloat
