// This header says where `fast` mode has its bits. It needs no CUDA header.
#pragma once

#include "narrowfloat/tensor.h"
#include "runtime/support.h"

namespace narrowfloat {

// Whether the GPU's approximate reciprocal is the one that defines `fast` (spec 4.3): known of
// Hopper's alone. `device` is a GPU that there is.
Support has_fast_math(Device device);

}  // namespace narrowfloat
