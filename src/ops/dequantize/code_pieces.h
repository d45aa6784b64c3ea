// Steps of the GPU dequantizer that are integer arithmetic, shared with the tests on the CPU.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace narrowfloat {

// E2M1 codes as E4M3 bytes of a 64th of their value, exactly: s|ee|m becomes s|00ee|m00, and the
// biases differ by 6. The two functions take the codes of the even columns (low nibbles) or of the
// odd ones from packed bytes.
inline constexpr float kE2m1InE4m3 = 64.0F;
NF_HOST_DEVICE constexpr uint32_t even_codes_as_e4m3(uint32_t packed) {
  return ((packed << 2) & 0x1C1C1C1CU) | ((packed << 4) & 0x80808080U);
}
NF_HOST_DEVICE constexpr uint32_t odd_codes_as_e4m3(uint32_t packed) {
  return ((packed >> 2) & 0x1C1C1C1CU) | (packed & 0x80808080U);
}

// scale_row() of tensor/grouped_rows.h for offsets that are not validated: the result is a row of
// the scales whatever they hold. row_offsets: [groups + 1], groups > 0.
NF_HOST_DEVICE constexpr int64_t clamped_scale_row(const int64_t* row_offsets, int64_t groups,
                                                   int64_t row, int64_t scale_rows) {
  // The last group that starts at or before the row.
  int64_t group = 0;
  int64_t beyond = groups;
  while (beyond - group > 1) {
    const int64_t middle = group + (beyond - group) / 2;
    if (row_offsets[middle] <= row) {
      group = middle;
    } else {
      beyond = middle;
    }
  }
  // The arithmetic is unsigned: memory may hold any bits, and they must not overflow.
  const auto start = static_cast<uint64_t>(row_offsets[group]);
  const uint64_t padded_start = (start + 31 * static_cast<uint64_t>(group)) / 32 * 32;
  const uint64_t scale_row = padded_start + static_cast<uint64_t>(row) - start;
  const auto last = static_cast<uint64_t>(scale_rows - 1);
  return static_cast<int64_t>(scale_row < last ? scale_row : last);
}

}  // namespace narrowfloat
