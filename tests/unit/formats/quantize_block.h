// One small matrix quantized through the public API with linear scales, in every CPU
// implementation: what the tests of single formats look at.
#pragma once

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/host_device.h"
#include "narrowfloat/quantize.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat {

// bf16 patterns.
inline constexpr uint16_t kPlusZero = 0x0000;
inline constexpr uint16_t kMinusZero = 0x8000;
inline constexpr uint16_t kOne = 0x3F80;
inline constexpr uint16_t kMinusOne = 0xBF80;
inline constexpr uint16_t kPlusInfinity = 0x7F80;
inline constexpr uint16_t kMinusInfinity = 0xFF80;
inline constexpr uint16_t kQuietNan = 0xFFC0;
inline constexpr uint16_t kSignallingNan = 0x7F81;

// in() gives the options of a mode, with() those that have an encode scale, too.
inline QuantizeOptions in(MathMode math, Ue8m0Rounding rounding = Ue8m0Rounding::kUp) {
  QuantizeOptions options;
  options.math = math;
  options.mx_scale = rounding;
  return options;
}
inline QuantizeOptions with(MathMode math, float encode_scale = 1.0F) {
  QuantizeOptions options;
  options.math = math;
  options.encode_scale = encode_scale;
  return options;
}

struct Quantized {
  std::vector<uint8_t> scales;    // Byte scales, or
  std::vector<float> f32_scales;  // F32 scales; row-major.
  std::vector<uint8_t> codes;     // One per element, row-major.
  std::vector<float> global;      // Stored decode scales.

  // Bitwise.
  friend bool operator==(const Quantized& a, const Quantized& b) {
    const auto same = [](const std::vector<float>& x, const std::vector<float>& y) {
      return x.size() == y.size() &&
             (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0);
    };
    return a.scales == b.scales && same(a.f32_scales, b.f32_scales) && a.codes == b.codes &&
           same(a.global, b.global);
  }
};

inline Quantized quantize_here(FormatId format, const TensorView& input,
                               const QuantizeOptions& options) {
  const int64_t rows = input.shape[0];
  const QuantizedLayout layout =
      quantized_layout(format, rows, input.shape[1], {.scale_layout = ScaleLayoutId::kLinear});
  std::vector<uint8_t> values(static_cast<size_t>(layout.values_bytes), 0xCC);
  const auto scale_count = static_cast<size_t>(layout.scale_count);
  const bool has_byte_scales = format_info(format).scale_type != ScaleType::kF32;
  Quantized result;
  result.scales.assign(has_byte_scales ? scale_count : 0, 0xCC);
  result.f32_scales.assign(has_byte_scales ? 0 : scale_count, -1.0F);
  result.global.assign(static_cast<size_t>(layout.global_scales), -1.0F);
  if (options.encode_scales.num_elements() == rows && !options.encode_scales.is_absent()) {
    result.global.assign(static_cast<size_t>(rows), -1.0F);
  }
  QuantizedView view = layout.bind(
      values.data(),
      has_byte_scales ? static_cast<void*>(result.scales.data()) : result.f32_scales.data(),
      nullptr);
  if (format_info(format).has_global_scale) {
    view.global_scale = TensorView::contiguous(result.global.data(), DType::kF32,
                                               {static_cast<int64_t>(result.global.size())});
  }
  quantize(input, view, options);
  for (const uint8_t byte : values) {
    if (format_info(format).element_bits == 8) {
      result.codes.push_back(byte);
    } else {
      result.codes.push_back(byte & 0xFU);
      result.codes.push_back(byte >> 4);
    }
  }
  return result;
}

// `elements`: rows * cols bit patterns of `dtype` (BF16, F16, or F8_E4M3 in the low byte).
inline Quantized quantize_matrix(FormatId format, DType dtype,
                                 const std::vector<uint16_t>& elements, int64_t rows,
                                 const QuantizeOptions& options = {}) {
  const std::vector<uint8_t> bytes(elements.begin(), elements.end());
  const bool is_byte = dtype == DType::kF8E4M3;
  const auto cols = static_cast<int64_t>(elements.size()) / rows;
  const auto input = is_byte ? TensorView::contiguous(bytes.data(), dtype, {rows, cols})
                             : TensorView::contiguous(elements.data(), dtype, {rows, cols});
  setenv("NARROWFLOAT_FORCE", "quantize:cpu_reference", 1);
  Quantized reference = quantize_here(format, input, options);
  unsetenv("NARROWFLOAT_FORCE");
  for (const Candidate& candidate : explain("quantize", {.rows = rows}).candidates) {
    if (!candidate.supported || candidate.name == "cpu_reference") continue;
    setenv("NARROWFLOAT_FORCE", ("quantize:" + candidate.name).c_str(), 1);
    EXPECT_TRUE(reference == quantize_here(format, input, options))
        << candidate.name << " and cpu_reference disagree";
    unsetenv("NARROWFLOAT_FORCE");
  }
  return reference;
}

// One row of bf16 elements, filled up with +0 to a multiple of `block`.
inline Quantized quantize_bf16_row(FormatId format, std::vector<uint16_t> elements, size_t block,
                                   const QuantizeOptions& options = {}) {
  elements.resize((elements.size() + block - 1) / block * block, kPlusZero);
  return quantize_matrix(format, DType::kBF16, elements, 1, options);
}

// The first codes of a row, for comparisons with a list.
using Codes = std::vector<int>;
inline Codes first_codes(const Quantized& quantized, size_t count) {
  return {quantized.codes.begin(), quantized.codes.begin() + static_cast<ptrdiff_t>(count)};
}

// One row of `cols` elements for each positive finite bf16 maximum: the maximum, its negative, half
// of it, both zeros, then +0. There are 32639.
inline std::vector<uint16_t> rows_of_every_bf16_maximum(size_t cols) {
  std::vector<uint16_t> elements;
  elements.reserve(0x7F7F * cols);
  for (uint32_t code = 1; code <= 0x7F7F; ++code) {
    const auto amax = static_cast<uint16_t>(code);
    const auto half = static_cast<uint16_t>(code > 0x80 ? code - 0x80 : code / 2);
    const size_t first = elements.size();
    elements.insert(elements.end(), {amax, static_cast<uint16_t>(amax | 0x8000U),
                                     static_cast<uint16_t>(half | 0x8000U), kMinusZero, kPlusZero});
    elements.resize(first + cols, kPlusZero);
  }
  return elements;
}

}  // namespace narrowfloat
