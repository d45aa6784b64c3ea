// A word of memory as a signal of the stream to the host, without a kernel.
#pragma once

#include <cstdint>

#include "narrowfloat/tensor.h"

namespace narrowfloat {

// Stores a word in stream order, after all that earlier work has written; can be captured. `to` is
// memory of the device, or of the host and mapped. Throws kDevice.
void write_word(uint32_t* to, uint32_t value, Device device, Stream stream);

}  // namespace narrowfloat
