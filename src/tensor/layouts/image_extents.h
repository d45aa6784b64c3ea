// Extents of a scale image: rows and scales per row, logical or padded.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/host_device.h"
#include "base/int_math.h"
#include "narrowfloat/format.h"

namespace narrowfloat {

struct ImageExtents {
  int64_t rows = 0;
  int64_t blocks = 0;
};

}  // namespace narrowfloat
