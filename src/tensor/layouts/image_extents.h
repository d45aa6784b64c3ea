// Extents of a scale image: rows and scales per row, logical or padded; and a place in it.
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

// Whose scale it is: of this block of this row.
struct ScalePlace {
  int64_t row = 0;
  int64_t block = 0;
};

}  // namespace narrowfloat
