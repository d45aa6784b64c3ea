// CUDA error codes as exceptions. Host code only.
#pragma once

#include <cuda_runtime_api.h>

namespace narrowfloat {

// Throws kDevice with `call`, a literal, and CUDA's message, and clears the last CUDA error.
void check_cuda(cudaError_t status, const char* call);

}  // namespace narrowfloat
