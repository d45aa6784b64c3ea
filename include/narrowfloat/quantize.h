// Quantize, dequantize, and everything around block scales.
//
// Source of every formula: docs/formats/ and docs/numerics.md. All operations
//   * check every argument before they write anything, and throw narrowfloat::Error;
//   * write the whole value and scale buffers they are given, padding as zero (exceptions named);
//   * give the same bytes for any implementation, thread count and floating-point environment;
//   * accept 0 rows and 0 columns.
// Inputs, `residual` and the output of dequantize may have any row stride of at least their
// columns (leading axes lie evenly; the input of a quantizer may also be a [batch, rows, cols] view
// with any two leading strides of at least cols, a transposed one, say); values, scales and all
// other outputs are dense. Buffers must not overlap.
//
// On the CPU tensors need the natural alignment of their element type. On CUDA devices everything
// but small vectors (encode_scales, valid_rows, ...) and the input of the maxima needs 16 bytes,
// and rows lie multiples of 16 bytes apart. Pointers must be memory of the device that they name;
// this is not checked. Calls return before the work is done. Values in device memory are not
// validated; bad ones give wrong numbers, never an access out of bounds.
#pragma once

#include <optional>
#include <span>

#include "narrowfloat/export.h"
#include "narrowfloat/format.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat {

// FP8 formats: the derivation of a multiplier and a stored F32 scale from a block maximum (spec
// 6.7).
enum class Fp8ScaleRule : int {
  kReciprocal = 0,      // m = 448 / amax; stored 1 / m.
  kReciprocalPow2 = 1,  // As kReciprocal with the mantissa of m cleared.
  kAmaxDiv = 2,         // Stored S = max(amax, eps) / 448; m = 1 / S.
  kPow2Ceil = 3,        // As kAmaxDiv with S raised to a power of two.
};
NARROWFLOAT_API std::string_view name(Fp8ScaleRule rule);

enum class FourOverSixError : int { kMae = 0, kMse = 1 };
enum class FourOverSixMath : int { kStrict = 0, kFast = 1 };

// NVFP4 only: each block tries the scale that maps its maximum to 6 and the one that maps it to 4,
// and keeps the one with the smaller error (spec 6.3). Not for F8_E4M3 input.
struct FourOverSix {
  bool enabled = false;
  FourOverSixError error = FourOverSixError::kMae;
  FourOverSixMath error_math = FourOverSixMath::kStrict;
  // 448 or 256. Changes the encode scale that is computed from a maximum, and the per-token base.
  int e4m3_max = 448;

  friend bool operator==(const FourOverSix&, const FourOverSix&) = default;
};

// Options that a format does not use must keep their defaults; anything else is an error.
struct QuantizeOptions {
  MathMode math = MathMode::kExact;

  // NVFP4 (and F8_E4M3 input to MXFP4): multiplies the tensor before quantization, usually
  // 448 * 6 / amax. Give a host value (finite, > 0), or a F32 tensor on the input's device: [1] or
  // [rows], or [batch] with valid_rows. With neither, NVFP4 computes it from the tensor's maximum
  // (from each batch's valid rows where valid_rows is given), and MXFP4 takes 1.
  std::optional<float> encode_scale;
  TensorView encode_scales;
  FourOverSix four_over_six;

  // NVFP4 per token: row scale = row maximum * this. A host value (finite, > 0), or a F32 tensor
  // [1] on the input's device, whose value must be finite and > 0. Default 1 / (e4m3_max * 6).
  std::optional<float> base_decode_scale;
  TensorView base_decode_scales;
  // NVFP4 per token: I32 [R], rows to work on. Entries outside [0, rows) are skipped; rows that are
  // not listed keep their values and get zero scales.
  TensorView row_list;

  Ue8m0Rounding mx_scale = Ue8m0Rounding::kUp;  // MXFP4, MXFP8.

  Fp8ScaleRule fp8_rule = Fp8ScaleRule::kReciprocal;
  std::optional<float> fp8_eps;           // Floor of a block maximum; default 0, or 1e-4 for the
                                          // kAmaxDiv and kPow2Ceil rules.
  std::optional<float> fp8_decode_scale;  // FP8 per tensor only: a given scale instead of the amax.

  // Byte-scale formats: I32 [batch], rows of each batch that count (clamped to [0, rows]). The
  // others keep their values and get zero scales.
  TensorView valid_rows;
  // FP8 1x128 only: I64 [groups + 1], ascending offsets that split the rows into groups whose
  // scales start at padded rows of one mn_major buffer (grouped_scale_row).
  TensorView row_offsets;
};

// input: F32, F16 or BF16 (FP4 formats also F8_E4M3), [rows, cols], [batch, rows, cols], or any
// leading extents whose product is output.batch * output.rows. output: made by
// quantized_layout(...).bind(...), with separate block scales for each output.batch.
NARROWFLOAT_API void quantize(const TensorView& input, const QuantizedView& output,
                              const QuantizeOptions& options = {}, Stream stream = {});

// y = silu(gate) * up rounded to the input's type, then quantize(y). gate_up: F16 or BF16
// [..., 2 * cols]; the first half of a row is the gate.
NARROWFLOAT_API void silu_mul_quantize(const TensorView& gate_up, const QuantizedView& output,
                                       const QuantizeOptions& options = {}, Stream stream = {});

// y = input * smooth[col] rounded to BF16, then quantize(y). input BF16, smooth BF16 [cols].
NARROWFLOAT_API void smooth_quantize(const TensorView& input, const TensorView& smooth,
                                     const QuantizedView& output,
                                     const QuantizeOptions& options = {}, Stream stream = {});

struct RmsNormOptions {
  float eps = 1e-6F;
  TensorView norm_output;  // Optional: the normalised tensor itself, input's type, [..., cols].
  ScaleView extra_scales;  // Optional (data != nullptr): the same scales in a second layout.
};

// y = rmsnorm(input) * weight rounded to the input's type, then quantize(y). input F16 or BF16
// [..., cols] with cols >= 64; weight of the same type, [cols].
NARROWFLOAT_API void rmsnorm_quantize(const TensorView& input, const TensorView& weight,
                                      const QuantizedView& output, const RmsNormOptions& norm = {},
                                      const QuantizeOptions& options = {}, Stream stream = {});

// As rmsnorm_quantize of h = input + residual (rounded to the type), with h stored to `residual`.
NARROWFLOAT_API void add_rmsnorm_quantize(const TensorView& input, const TensorView& residual,
                                          const TensorView& weight, const QuantizedView& output,
                                          const RmsNormOptions& norm = {},
                                          const QuantizeOptions& options = {}, Stream stream = {});

struct DequantizeOptions {
  // compressed-tensors files store the global scale as a divisor: value = code * (scale / global).
  // By default global_scale multiplies: value = code * (scale * global).
  bool global_scale_divides = false;
  // The offsets that a grouped FP8 1x128 tensor was quantized with.
  TensorView row_offsets;
};

// output: F32, F16 or BF16, [..., cols]. One arithmetic, that of exact mode (spec 7).
NARROWFLOAT_API void dequantize(const QuantizedView& input, const TensorView& output,
                                const DequantizeOptions& options = {}, Stream stream = {});

// Copies scales into another layout that `format` allows; padding is written as zero. Type, batch,
// rows and blocks must agree.
NARROWFLOAT_API void relayout(FormatId format, const ScaleView& input, const ScaleView& output,
                              Stream stream = {});

// Largest |x| that is a number; 0 if there is none. input F32, F16 or BF16; output F32 [1], or
// [rows] with rows = product of the leading extents.
NARROWFLOAT_API void tensor_amax(const TensorView& input, const TensorView& output,
                                 Stream stream = {});
NARROWFLOAT_API void row_amax(const TensorView& input, const TensorView& output,
                              Stream stream = {});

// Conversions between the two directions of a global scale (spec 1.6). They evaluate the formulas
// alone, for any input, and so can stand in for values that a device computes; quantize() checks
// its arguments. e4m3_max is 448 or 256, anything else throws kInvalidArgument.
NARROWFLOAT_API float encode_scale_from_amax(float amax, int e4m3_max = 448);
NARROWFLOAT_API float decode_scale_from_encode(float encode_scale);  // The same in both math modes.
NARROWFLOAT_API float encode_scale_from_decode(float decode_scale,
                                               MathMode math = MathMode::kExact);
// Converts tensors of scales: dense F32 tensors of equal size on one device.
NARROWFLOAT_API void encode_scales_from_decode(const TensorView& decode_scales,
                                               const TensorView& encode_scales,
                                               MathMode math = MathMode::kExact,
                                               Stream stream = {});

}  // namespace narrowfloat
