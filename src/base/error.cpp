// Names of error kinds, and the throwing helpers that need no template.
#include "narrowfloat/error.h"

#include "base/bad_enumerator.h"
#include "base/throw_error.h"

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

void throw_bad_enumerator(const char* what, int value) {
  throw_invalid("{}: {} is not one of its values", what, value);
}

}  // namespace narrowfloat
