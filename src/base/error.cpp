#include "narrowfloat/error.h"

namespace narrowfloat {

std::string_view to_string(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kInvalidArgument:
      return "invalid argument";
    case ErrorKind::kUnsupported:
      return "unsupported";
    case ErrorKind::kCorruptData:
      return "corrupt data";
    case ErrorKind::kIo:
      return "I/O error";
    case ErrorKind::kDevice:
      return "device error";
  }
  return "unknown";
}

}  // namespace narrowfloat
