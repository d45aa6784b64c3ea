// Run-time access to the scale layouts.
#include "base/throw_error.h"
#include "narrowfloat/format.h"
#include "tensor/layouts/registry.h"

namespace narrowfloat {

int bytes(ScaleType type) {
  name(type);  // Refuses values that are no scale types.
  return type == ScaleType::kF32 ? 4 : 1;
}

int64_t scale_image_size(ScaleLayoutId layout, int64_t rows, int64_t blocks) {
  if (rows < 0 || blocks < 0) {
    throw_invalid("scales: expected rows and blocks >= 0, got {} x {}", rows, blocks);
  }
  // Padding adds at most 127; checked_mul checks the product against 2^63.
  constexpr int64_t kMaxExtent = INT64_MAX - 128;
  std::optional<int64_t> size;
  if (rows <= kMaxExtent && blocks <= kMaxExtent) {
    visit_layout(layout, [&]<typename Layout>() {
      const ScaleExtents padded = Layout::padded({rows, blocks});
      size = checked_mul(padded.rows, padded.blocks);
    });
  }
  if (!size) throw_invalid("scales: {} x {} exceed 2^63", rows, blocks);
  return *size;
}

int64_t grouped_scale_row(int64_t row_offset, int64_t group) {
  return (row_offset + 31 * group) / 32 * 32;
}

int64_t scale_offset(ScaleLayoutId layout, int64_t row, int64_t block, int64_t rows,
                     int64_t blocks) {
  if (row < 0 || row >= rows || block < 0 || block >= blocks) {
    throw_invalid("scale offset: ({}, {}) is outside the {} x {} scales", row, block, rows, blocks);
  }
  int64_t offset = 0;
  visit_layout(layout, [&]<typename Layout>() {
    offset = Layout::offset(row, block, {rows, blocks});
  });
  return offset;
}

}  // namespace narrowfloat
