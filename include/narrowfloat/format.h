// Block-scaled formats, scale layouts, and views of quantized tensors.
//
// A quantized tensor is three buffers: element codes ("values"), block scales in one of several
// layouts ("scales"), and for the NVFP4 family a decode scale for the whole tensor or for each row
// ("global scale"). All names that users see ("nvfp4", "swizzled_128x4") are defined here once.
// docs/formats/ has a page for each format.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "narrowfloat/export.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat {

enum class FormatId : int {
  kNvfp4 = 0,
  kNvfp4PerToken = 1,
  kMxfp4 = 2,
  kMxfp8 = 3,
  kFp8Block1x128 = 4,
  kFp8Block128x128 = 5,
  kFp8Tensor = 6,
};

// The element type of stored block scales. It is never guessed from bytes, dtypes or block sizes.
enum class ScaleType : int { kE4M3 = 0, kUE8M0 = 1, kF32 = 2 };

enum class ScaleLayoutId : int {
  kLinear = 0,
  kSwizzled128x4 = 1,
  kSwizzled8x4 = 2,
  kMnMajor = 3,
};

// `exact`: IEEE single precision, equal to the published reference formulas bit for bit. `fast`:
// flush-to-zero with approximate reciprocals, equal to common GPU kernels bit for bit. Both give
// the same bytes on every device.
enum class MathMode : int { kExact = 0, kFast = 1 };

// The rounding of a block maximum to a power-of-two scale. kUp never clips, kFloor is OCP MX 1.0,
// kEven rounds the maximum to the element's mantissa first.
enum class Ue8m0Rounding : int { kUp = 0, kFloor = 1, kEven = 2 };

// The range of one global scale of NVFP4: the whole tensor, each row (shared by the batches), or
// each batch (as valid_rows wants).
enum class ScaleAxis : int { kTensor = 0, kRow = 1, kBatch = 2 };

// Everything a caller may ask about a format, for listings and size computations.
struct FormatInfo {
  FormatId id;
  std::string_view name;         // "nvfp4"
  std::string_view description;  // One line for listings.
  int element_bits;              // 4 or 8
  int64_t block_rows;            // Elements that share a scale: rows x cols; 0 means "all of them".
  int64_t block_cols;
  ScaleType scale_type;
  ScaleLayoutId default_layout;
  std::array<bool, 4> layouts;  // Legal layouts, indexed by ScaleLayoutId.
  bool has_global_scale;        // One decode scale (or one per row) beside the block scales.
  bool has_row_scale;           // The global scale has one value per row, computed from that row.

  [[nodiscard]] bool allows(ScaleLayoutId layout) const {
    const auto index = static_cast<size_t>(layout);
    return index < layouts.size() && layouts[index];
  }
};

// All formats, in the order of FormatId.
NARROWFLOAT_API std::span<const FormatInfo> all_formats();
NARROWFLOAT_API const FormatInfo& format_info(FormatId id);

NARROWFLOAT_API std::string_view name(FormatId id);
NARROWFLOAT_API std::string_view name(ScaleType type);
NARROWFLOAT_API std::string_view name(ScaleLayoutId layout);
NARROWFLOAT_API std::string_view name(MathMode mode);
NARROWFLOAT_API std::string_view name(Ue8m0Rounding rounding);

// Inverses of name(). Throw kInvalidArgument that lists the accepted spellings.
NARROWFLOAT_API FormatId parse_format(std::string_view text);
NARROWFLOAT_API ScaleLayoutId parse_scale_layout(std::string_view text);
NARROWFLOAT_API MathMode parse_math_mode(std::string_view text);
NARROWFLOAT_API Ue8m0Rounding parse_ue8m0_rounding(std::string_view text);

// Bytes of one stored scale: 1 or 4.
NARROWFLOAT_API int bytes(ScaleType type);

// The block scales of one matrix in a layout, or of `batch` matrices one after another. Rows and
// blocks are logical: the layout pads them, and the padding is part of the buffer (and always
// zero).
struct ScaleView {
  void* data = nullptr;
  ScaleType type = ScaleType::kE4M3;
  ScaleLayoutId layout = ScaleLayoutId::kLinear;
  Device device;
  int64_t batch = 1;
  int64_t rows = 0;
  int64_t blocks = 0;    // Scales per logical row.
  int64_t capacity = 0;  // Scales in the buffer; must equal batch * scale_image_size(...).
};

// Scales of one matrix of rows x blocks in a layout, padding included (quantization spec 8.2).
NARROWFLOAT_API int64_t scale_image_size(ScaleLayoutId layout, int64_t rows, int64_t blocks);
// FP8 1x128 with row groups (spec 8.6): the first scale row of group `group`, whose rows start at
// `row_offset`. With group = number of groups and row_offset = all rows, the result is the number
// of scale rows.
// REQUIRES: both >= 0, row_offset + 31 * group below 2^63.
NARROWFLOAT_API int64_t grouped_scale_row(int64_t row_offset, int64_t group);
// Position of the scale of (row, block) within the layout's buffer, in scales.
NARROWFLOAT_API int64_t scale_offset(ScaleLayoutId layout, int64_t row, int64_t block, int64_t rows,
                                     int64_t blocks);

// A quantized [batch, rows, cols] tensor.
struct QuantizedView {
  FormatId format = FormatId::kNvfp4;
  int64_t batch = 1;
  int64_t rows = 0;
  int64_t cols = 0;  // Logical K.
  // Element codes, dense: U8 [batch, rows, cols / 2] (even column in the low nibble) for 4-bit
  // elements, F8_E4M3 [batch, rows, value_cols] for 8-bit ones. Leading extents of 1 may be left
  // out.
  TensorView values;
  ScaleView scales;
  // F32 decode scales (they multiply on dequantization): [1], [rows] (shared by the batches; per
  // token [batch * rows]) or [batch, 1]. [batch] is understood where it differs from rows. Absent
  // for formats without a global scale.
  TensorView global_scale;
};

// Buffer sizes of a quantized [batch, rows, cols] tensor.
struct QuantizedLayout {
  FormatId format;
  ScaleLayoutId scale_layout;
  int64_t batch;
  int64_t rows;
  int64_t cols;
  int64_t value_cols;    // cols, or cols rounded up to `alignment` (MXFP8).
  int64_t values_bytes;  // All batches.
  int64_t scale_rows;    // Logical rows and blocks of the scales of one batch.
  int64_t scale_blocks;
  int64_t scale_count;  // Scales of all batches, padding included.
  int64_t scales_bytes;
  ScaleAxis global_scale_axis;
  int64_t global_scales;  // F32 values: 0, 1, rows or batch by the axis; per token batch * rows.

  // Views over caller's buffers of exactly these sizes.
  [[nodiscard]] NARROWFLOAT_API QuantizedView bind(void* values, void* scales, float* global_scale,
                                                   Device device = {}) const;
};

struct QuantizedLayoutOptions {
  std::optional<ScaleLayoutId> scale_layout;  // Default: the format's default layout.
  int64_t batch = 1;
  int64_t alignment = 32;  // MXFP8 only: value columns are padded to a multiple of this.
  // FP8 1x128 only: number of row groups, whose scales start at padded rows of one mn_major buffer
  // (QuantizeOptions::row_offsets); 0 for none.
  int64_t groups = 0;
  ScaleAxis global_scale_axis = ScaleAxis::kTensor;  // Other values for NVFP4 only.
};

// Throws kInvalidArgument for a negative extent, a K the format cannot split into blocks, an
// illegal layout, or sizes beyond 63 bits.
NARROWFLOAT_API QuantizedLayout quantized_layout(FormatId format, int64_t rows, int64_t cols,
                                                 const QuantizedLayoutOptions& options = {});

}  // namespace narrowfloat
