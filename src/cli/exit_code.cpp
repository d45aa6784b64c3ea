// The switch has no default: a new error kind does not compile until it has an exit code.
#include "cli/exit_code.h"

namespace narrowfloat::cli {

ExitCode exit_code(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kInvalidArgument:
      return ExitCode::kUsage;
    case ErrorKind::kIo:
    case ErrorKind::kCorruptData:
      return ExitCode::kInput;
    case ErrorKind::kUnsupported:
      return ExitCode::kUnsupported;
    case ErrorKind::kDevice:
      return ExitCode::kInternal;
  }
  return ExitCode::kInternal;
}

}  // namespace narrowfloat::cli
