// Where a GPU's matrix cores take rows of a RowFormat as bf16 (moe spec 11.1), what makes the rows
// may leave them as bf16 beside their codes and save a pass over them: code times block scale,
// exact. FP8 1x128 scales stay out of the values.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace narrowfloat {

struct DequantizedRows {
  uint16_t* values = nullptr;  // bf16 [rows][cols]; null: codes alone are wanted.
  // Optional: a factor of each row, a power of two that its values are to be multiplied by. Only
  // what sees whole rows can make such rows.
  float* factors = nullptr;

  [[nodiscard]] NF_HOST_DEVICE constexpr bool has_values() const { return values != nullptr; }
};

}  // namespace narrowfloat
