// How exceptions of the library reach Python: the kind decides the class, the text stays the same.
#pragma once

namespace narrowfloat::python {

// kInvalidArgument and kCorruptData become ValueError, kUnsupported NotImplementedError, kIo
// OSError, kDevice RuntimeError.
void register_errors();

}  // namespace narrowfloat::python
