// Buffers of activation rows in a RowFormat: their sizes, and views over them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "narrowfloat/moe_types.h"
#include "tensor/row_format.h"

namespace narrowfloat {

// Every part starts at a multiple of this.
inline constexpr int64_t kWorkspaceAlignment = 256;

struct RowBuffers {
  RowFormat format = RowFormat::kBf16;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t values_bytes = 0;
  int64_t scales_bytes = 0;     // Linear [rows, scale_blocks].
  int64_t row_scale_bytes = 0;  // One F32 a row, where has_row_scale(format).

  // All parts, each rounded up to kWorkspaceAlignment.
  [[nodiscard]] int64_t bytes() const;
  // Views over `buffer`, aligned to kWorkspaceAlignment, for the first `used` rows.
  [[nodiscard]] CodedRows bind(std::byte* buffer, int64_t used, Device device) const;
};

RowBuffers row_buffers(RowFormat format, int64_t rows, int64_t cols);

}  // namespace narrowfloat
