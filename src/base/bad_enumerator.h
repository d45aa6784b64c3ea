// The error for an enumerator value that is none of its type's. It is separate from throw_error.h
// because headers shared with CUDA code use it, and fmt does not compile there.
#pragma once

namespace narrowfloat {

[[noreturn]] void throw_bad_enumerator(const char* what, int value);

}  // namespace narrowfloat
