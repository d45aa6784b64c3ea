// See device_code.h. No other source knows them, so that builds for other GPUs can share the rest.
#include "runtime/cuda/device_code.h"

namespace narrowfloat {

std::string_view compiled_architectures() { return NARROWFLOAT_CUDA_ARCHITECTURES; }

}  // namespace narrowfloat
