// A range of rows of a quantized weight in memory: codes and linear block scales as the convention
// stores them, and the scale of the whole tensor in the convention's own direction.
//
// All code that encodes or decodes file data uses this class, so that the figures printed after
// quantizing, `diff` and `dequantize` see the same values to the bit.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/conventions/convention.h"
#include "layers/encode_settings.h"
#include "layers/error_figures.h"
#include "narrowfloat/format.h"
#include "narrowfloat/quantize.h"

namespace narrowfloat {

class QuantizedWeight {
 public:
  // Buffers for `rows` rows; `global_scale` as stored (1 where the convention has none).
  QuantizedWeight(const ConventionSpec& spec, int64_t rows, int64_t cols, float global_scale);

  // Sets the rows of the last range of a tensor, at most those of the constructor.
  void set_rows(int64_t rows);
  [[nodiscard]] int64_t rows() const { return layout_.rows; }
  [[nodiscard]] int64_t cols() const { return layout_.cols; }
  [[nodiscard]] const ConventionSpec& spec() const { return spec_; }
  [[nodiscard]] float global_scale() const { return global_scale_; }

  [[nodiscard]] std::span<std::byte> values();
  // Scales of the format's scale type: bytes, or F32.
  [[nodiscard]] std::span<std::byte> scales();
  // Those of each row, or the one of all; for conventions whose scales are no blocks'.
  void set_whole_scales(std::span<const float> scales);
  // Returns the scales of this range as files have them; its first row is `first` of the tensor.
  // The scale of a whole tensor is in the first range only. Valid until the next call.
  [[nodiscard]] std::span<const std::byte> stored_scales(int64_t first);

  // Views over the buffers. global_scale: address of the view's F32 value; may be nullptr for
  // formats without one.
  [[nodiscard]] QuantizedView view(float* global_scale);

  // Dequantizes with the producer's arithmetic. output: F32, F16 or BF16 [rows, cols].
  void decode(const TensorView& output);
  // The same with another scale of the whole tensor, as stored.
  void decode_with(float global_scale, const TensorView& output);
  // One element, unrounded and beyond the range of F32 too.
  [[nodiscard]] double value(int64_t row, int64_t col) const;

  [[nodiscard]] ClipLimits clip_limits() const;

  static uint64_t buffer_bytes(const ConventionSpec& spec, int64_t rows, int64_t cols);
  // Bytes of codes and scales in a file.
  static uint64_t stored_bytes(const ConventionSpec& spec, int64_t rows, int64_t cols);

 private:
  [[nodiscard]] float decode_scale(int64_t row, int64_t block) const;
  // Those of a row's blocks from `first_block` on, which are F32 numbers.
  void decode_scales(int64_t row, int64_t first_block, std::span<double> scales) const;
  [[nodiscard]] float code_value(int64_t row, int64_t col) const;
  void decode_integers(const TensorView& output) const;

  const ConventionSpec& spec_;
  QuantizedLayout layout_;
  std::vector<std::byte> values_;
  std::vector<std::byte> scales_;
  std::vector<std::byte> stored_scales_;  // Used for those of rows.
  float global_scale_;
};

// The two directions of the scale of a whole tensor with maximum `amax`.
struct TensorScale {
  float encode = 1;  // Multiplies in the quantizer.
  float stored = 1;  // Stored in the file.
};
TensorScale tensor_scale(const ConventionSpec& spec, const EncodeSettings& settings, float amax);

// Quantizes `input`, F32, F16 or BF16 [rows, cols]. `encode_scale`: the tensor_scale() of the
// convention. A zero scale is replaced by the convention's
// byte, and the codes of that block are those of the stored scale. `col_weights`: as in
// search_scales().
void encode(const TensorView& input, const EncodeSettings& settings, float encode_scale,
            QuantizedWeight& output, std::span<const float> col_weights = {});

}  // namespace narrowfloat
