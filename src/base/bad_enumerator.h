// The error for an enumerator value that is none of its type's. Apart from throw_error.h because
// the headers shared with CUDA code use it, and fmt does not compile there.
#pragma once

namespace narrowfloat {

[[noreturn]] void throw_bad_enumerator(const char* what, int value);

}  // namespace narrowfloat
