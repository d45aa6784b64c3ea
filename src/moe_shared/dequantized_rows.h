// Rows of a RowFormat dequantized to bf16, which a GPU's tensor cores multiply in some modes (moe
// spec 11.1). The kernel that quantizes rows may store them as bf16 beside the codes, which saves a
// pass over them. Values are code times block scale, exact; the scales of FP8 1x128 stay out of the
// values.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace narrowfloat {

struct DequantizedRows {
  uint16_t* values = nullptr;  // bf16 [rows][cols]; null: only codes are stored.
  // Optional: a factor of each row, a power of two that its values are multiplied by later. Only
  // kernels that see whole rows can compute it.
  float* factors = nullptr;

  [[nodiscard]] NF_HOST_DEVICE constexpr bool has_values() const { return values != nullptr; }
};

}  // namespace narrowfloat
