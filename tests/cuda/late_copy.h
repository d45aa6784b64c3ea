// A kernel that lets the next one start long before it has written anything: what a consumer under
// programmatic dependent launch must wait for.
#pragma once

#include "narrowfloat/tensor.h"

namespace narrowfloat::testing {

// Copies num_words 32-bit words of device memory, tens of microseconds after it has triggered the
// next launch.
void copy_late(void* to, const void* from, int64_t num_words, Stream stream);

}  // namespace narrowfloat::testing
