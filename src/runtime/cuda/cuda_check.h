// CUDA error codes as exceptions. Host code only.
#pragma once

#include <cuda_runtime_api.h>

namespace narrowfloat {

// Throws kDevice with `call`, the name of what failed, and CUDA's own words. `call` is a literal.
void check_cuda(cudaError_t status, const char* call);

}  // namespace narrowfloat
