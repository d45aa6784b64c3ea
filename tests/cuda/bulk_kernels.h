// Data that is too large to come from the host, and to go back there: made and compared on the GPU.
#pragma once

#include <cstdint>

#include "support/device_buffer.h"

namespace narrowfloat::testing {

// BF16 numbers of both signs and magnitudes 2^-7 to 2^8, a different one in each place.
void fill_with_numbers(const DeviceBuffer& buffer);

// Bytes in which two buffers of one size differ.
int64_t count_differences(const DeviceBuffer& a, const DeviceBuffer& b);

}  // namespace narrowfloat::testing
