// See driver_function.h.
#include "runtime/cuda/driver_function.h"

#include <cuda_runtime_api.h>

#include "base/throw_error.h"
#include "runtime/cuda/cuda_check.h"

namespace narrowfloat {

void* find_driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check_cuda(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found),
             "cudaGetDriverEntryPointByVersion");
  if (found != cudaDriverEntryPointSuccess || function == nullptr) {
    throw_error(ErrorKind::kDevice, "the CUDA driver has no {}", name);
  }
  return function;
}

}  // namespace narrowfloat
