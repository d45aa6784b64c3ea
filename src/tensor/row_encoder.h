// Encodes a row of fp32 values in the formats of activation rows, with the bytes of the public
// quantizers in exact mode. The activation and the layer's quantization of inputs use it. A row may
// be encoded in chunks of columns; nothing is allocated.
//
//   kBf16, kFp32     rounded to nearest even; NaN is canonical
//   kFp8Static       E4M3(RN(x * multiplier))                          (spec 6.9)
//   kFp8Group        rule reciprocal, the last group may be short      (spec 6.7)
//   kMxfp8           scales rounded up                                 (spec 6.5)
//   kNvfp4           encode scale = multiplier                         (spec 6.1)
//   kNvfp4PerToken   encode scale from the row's maximum, base 1/2688  (spec 6.2)
//   kFp8Token        rule reciprocal, the row is one block             (spec 6.7)
#pragma once

#include <cstdint>

#include "base/float_ops.h"
#include "formats/block_format.h"
#include "narrowfloat/moe_types.h"
#include "tensor/row_format.h"

namespace narrowfloat {

// Decode scale of a kNvfp4PerToken row over its maximum (spec 6.2).
inline constexpr float kTokenBaseDecodeScale = 1.0F / (448.0F * 6.0F);

struct RowRules {
  RowFormat format = RowFormat::kBf16;
  float multiplier = 1.0F;  // kFp8Static and kNvfp4 only.
  // kFp8Group, kFp8Token: largest_finite() of the type that x was widened from.
  float input_max = kFloatMax;
};

// Destination of a row.
struct RowTarget {
  uint8_t* values = nullptr;   // Column 0.
  void* scales = nullptr;      // Block 0, where the format has block scales.
  int64_t scale_stride = 1;    // Scales from a block to the next.
  float* row_scale = nullptr;  // Where has_row_scale(format).
};

// The destination of row `row` of a checked CodedRows with `cols` columns.
RowTarget row_target(const CodedRows& rows, RowFormat format, int64_t row, int64_t cols);

class RowEncoder {
 public:
  // Chunks of a row start at multiples of this.
  static constexpr int64_t kUnit = 128;

  explicit RowEncoder(const RowRules& rules);

  // True where start_row must be given the maximum of the whole row.
  [[nodiscard]] bool needs_row_amax() const { return has_row_scale(rules_.format); }
  // Stores the row scale. row_amax: the maximum over the elements that are numbers, 0 without any.
  void start_row(float row_amax, const RowTarget& target);
  // Encodes columns [col, col + count). col is a multiple of kUnit, and so is count unless the row
  // ends there.
  void encode(const float* x, int64_t col, int64_t count, const RowTarget& target) const;

 private:
  RowRules rules_;
  ScalePair pair_;
};

// Encodes a whole row. cols: a multiple of 32 for kMxfp8, of 16 for NVFP4.
void encode_row(const RowRules& rules, const float* x, int64_t cols, const RowTarget& target);

}  // namespace narrowfloat
