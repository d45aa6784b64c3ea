// Extents of the scales of a matrix: rows and scales per row, logical or padded; and the place of a
// scale.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/host_device.h"
#include "base/int_math.h"
#include "narrowfloat/format.h"

namespace narrowfloat {

struct ScaleExtents {
  int64_t rows = 0;
  int64_t blocks = 0;
};

// The row and block that a scale belongs to.
struct ScalePlace {
  int64_t row = 0;
  int64_t block = 0;
};

}  // namespace narrowfloat
