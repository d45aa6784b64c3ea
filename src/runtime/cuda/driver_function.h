// Functions of the CUDA driver, looked up by name, so that programs need not link a library that
// machines without a GPU do not have. Host code only.
#pragma once

namespace narrowfloat {

// The function `name` as CUDA 12.0 has it. Throws kDevice where there is no driver, or an older
// one.
void* find_driver_function(const char* name);

// Takes decltype(&cuFunction) as its type.
template <typename Function>
Function driver_function(const char* name) {
  return reinterpret_cast<Function>(find_driver_function(name));
}

}  // namespace narrowfloat
