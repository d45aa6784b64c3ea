// Calls the library where that must fail, and catches the error by its own type. Exits with 0 if
// type and kind are right.
#include <cstdio>

#include "narrowfloat/narrowfloat.h"

int main() {
  try {
    narrowfloat::parse_format("nvfp5");
  } catch (const narrowfloat::Error& error) {
    std::printf("%s\n", error.what());
    return error.kind() == narrowfloat::ErrorKind::kInvalidArgument ? 0 : 1;
  }
  return 1;
}
