// Exit codes of the program, and the one place where an error becomes one. docs/cli.md lists them
// for users; scripts depend on them, so a code never changes its meaning.
#pragma once

#include "narrowfloat/error.h"

namespace narrowfloat::cli {

enum class ExitCode : int {
  kDone = 0,
  kFindings = 1,     // The command worked and found something: a difference, a failed check.
  kUsage = 2,        // The request can never work: wrong option, wrong value.
  kInput = 3,        // The operating system refused, or a file is malformed.
  kUnsupported = 4,  // Valid, but nothing on this machine or in this version can do it.
  kInternal = 5,     // A device fault or a bug.
  kInterrupted = 130,
};

ExitCode exit_code(ErrorKind kind);

}  // namespace narrowfloat::cli
