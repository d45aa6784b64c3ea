// Activation rows in guarded memory: the buffers of a CodedRows, and its views.
#pragma once

#include <vector>

#include "narrowfloat/moe_types.h"
#include "support/guarded_buffer.h"

namespace narrowfloat::testing {

enum class ScaleOrder {
  kRowsFirst,    // [rows, blocks], dense.
  kBlocksFirst,  // [blocks, rows], dense.
};

struct RowsTensor {
  GuardedBuffer values;
  GuardedBuffer scales;
  GuardedBuffer row_scale;
  CodedRows view;

  RowsTensor() = default;
  RowsTensor(RowFormat format, int64_t rows, int64_t cols, const BufferStyle& style = {},
             ScaleOrder order = ScaleOrder::kRowsFirst);
  [[nodiscard]] bool intact() const {
    return values.intact() && scales.intact() && row_scale.intact();
  }
  // Everything that is stored, buffer after buffer.
  [[nodiscard]] std::vector<uint8_t> bytes() const;
};

// The stored bytes of one row, whatever the order of the scales.
struct RowBytes {
  std::vector<uint8_t> values;
  std::vector<uint8_t> scales;
  std::vector<uint8_t> row_scale;
  bool operator==(const RowBytes&) const = default;
};
RowBytes row_bytes_of(const RowsTensor& tensor, int64_t row);

}  // namespace narrowfloat::testing
