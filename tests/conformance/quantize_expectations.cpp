// See quantize_expectations.h.
#include "conformance/quantize_expectations.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include <fmt/format.h>

#include "formats/minifloat.h"

namespace narrowfloat::testing {
namespace {

int64_t value_row_bytes(const QuantizedLayout& layout) {
  const bool is_packed = format_info(layout.format).element_bits == 4;
  return is_packed ? layout.value_cols / 2 : layout.value_cols;
}

using ByteRow = std::span<const uint8_t>;

ByteRow value_row(const QuantizedLayout& layout, const QuantizeOutput& output, int64_t flat_row) {
  const auto bytes = static_cast<size_t>(value_row_bytes(layout));
  return ByteRow(output.tensor.values).subspan(static_cast<size_t>(flat_row) * bytes, bytes);
}

// The scales (of all batches) that a visited row owns.
std::vector<bool> owned_scales(const QuantizeCase& c, const QuantizedLayout& layout,
                               ScaleLayoutId scale_layout) {
  const int64_t scales_per_batch =
      scale_image_size(scale_layout, layout.scale_rows, layout.scale_blocks);
  std::vector<bool> owned(static_cast<size_t>(c.batch * scales_per_batch), false);
  if (format_info(c.format).block_rows == 0) {
    // One scale a tensor, also of an empty one.
    owned.assign(owned.size(), true);
    return owned;
  }
  for (int64_t batch = 0; batch < c.batch; ++batch) {
    for (int64_t row = 0; row < c.rows; ++row) {
      if (!c.is_visited(batch, row)) continue;
      // Blocks that hold only pad columns stay zero.
      const int64_t blocks =
          (c.cols + format_info(c.format).block_cols - 1) / format_info(c.format).block_cols;
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t offset = scale_offset(scale_layout, c.scale_row(row), block,
                                            layout.scale_rows, layout.scale_blocks);
        owned[static_cast<size_t>(batch * scales_per_batch + offset)] = true;
      }
    }
  }
  return owned;
}

std::string pad_violation(const QuantizeCase& c, const QuantizedLayout& layout,
                          ScaleLayoutId scale_layout, const std::vector<uint8_t>& scales) {
  const auto width = static_cast<size_t>(bytes(format_info(c.format).scale_type));
  const std::vector<bool> owned = owned_scales(c, layout, scale_layout);
  if (owned.size() * width != scales.size()) return "the scales have another size";
  for (size_t i = 0; i < scales.size(); ++i) {
    if (!owned[i / width] && scales[i] != 0) {
      return fmt::format("scale byte {} of {} is padding and {:#04x}", i, name(scale_layout),
                         scales[i]);
    }
  }
  return {};
}

std::string value_violation(const QuantizeCase& c, const QuantizedLayout& layout,
                            const QuantizeOutput& output, uint8_t poison) {
  for (int64_t row = 0; row < c.batch * c.rows; ++row) {
    const ByteRow bytes = value_row(layout, output, row);
    if (!c.is_visited(row / c.rows, row % c.rows)) {
      if (std::ranges::any_of(bytes, [&](uint8_t byte) { return byte != poison; })) {
        return fmt::format("values of row {}, which is not visited, changed", row);
      }
    } else if (layout.value_cols > c.cols) {
      if (std::ranges::any_of(bytes.subspan(static_cast<size_t>(c.cols)),
                              [](uint8_t byte) { return byte != 0; })) {
        return fmt::format("pad columns of row {} are not zero", row);
      }
    }
  }
  return {};
}

std::string row_scale_violation(const QuantizeCase& c, const QuantizeOutput& output) {
  if (!format_info(c.format).has_row_scale) return {};
  for (int64_t row = 0; row < c.batch * c.rows; ++row) {
    uint32_t scale = 0;
    std::memcpy(&scale, output.tensor.global_scale.data() + row * 4, 4);
    if (!c.is_visited(row / c.rows, row % c.rows) && scale != 0) {
      return fmt::format("the row scale of row {}, which is not visited, is {:#x}", row, scale);
    }
  }
  return {};
}

bool is_finite_scale(float scale) { return std::isfinite(scale) && scale > 0.0F; }

// Finite input and scales that a host could have passed (spec 14.7).
bool must_be_finite(const QuantizeCase& c) {
  if (c.math != MathMode::kExact || c.source != RowSourceKind::kPlain) return false;
  if (!is_finite(c.fill) || c.dtype == DType::kF8E4M3) return false;
  return std::ranges::all_of(c.encode_scales, is_finite_scale);
}

std::string finite_violation(const QuantizeCase& c, const QuantizedLayout& layout,
                             const QuantizeOutput& output) {
  if (!must_be_finite(c)) return {};
  const FormatInfo& info = format_info(c.format);
  const std::vector<uint8_t>& scales = output.tensor.scales;
  for (size_t i = 0; i < scales.size(); i += static_cast<size_t>(bytes(info.scale_type))) {
    bool is_bad =
        info.scale_type == ScaleType::kE4M3 ? (scales[i] & 0x7F) == 0x7F : scales[i] == 0xFF;
    if (info.scale_type == ScaleType::kF32) {
      float scale = 0.0F;
      std::memcpy(&scale, scales.data() + i, 4);
      is_bad = !std::isfinite(scale);
    }
    if (is_bad) return fmt::format("scale byte {} is not finite for finite input", i);
  }
  for (int64_t row = 0; row < c.batch * c.rows && info.element_bits == 8; ++row) {
    if (!c.is_visited(row / c.rows, row % c.rows)) continue;
    for (const uint8_t code : value_row(layout, output, row)) {
      if ((code & 0x7F) == 0x7F) return fmt::format("row {} has a NaN code for finite input", row);
    }
  }
  return {};
}

std::string first_difference(std::string_view what, ByteRow expected, ByteRow actual) {
  if (expected.size() != actual.size()) return fmt::format("{}: sizes differ", what);
  const auto [e, a] = std::ranges::mismatch(expected, actual);
  if (e == expected.end()) return {};
  return fmt::format("{}: byte {} of {} is {:#04x}, expected {:#04x}", what, e - expected.begin(),
                     expected.size(), *a, *e);
}

std::string value_difference(const QuantizeCase& c, const QuantizeOutput& expected,
                             const QuantizeOutput& actual) {
  const QuantizedLayout layout = layout_of(c);
  for (int64_t row = 0; row < c.batch * c.rows; ++row) {
    if (!c.is_visited(row / c.rows, row % c.rows)) continue;
    const std::string text =
        first_difference(fmt::format("values of row {}", row), value_row(layout, expected, row),
                         value_row(layout, actual, row));
    if (!text.empty()) return text;
  }
  return {};
}

}  // namespace

std::string violation_of(const QuantizeCase& c, const QuantizeOutput& output, uint8_t poison) {
  if (!output.canaries_intact) return "a canary beside a buffer was overwritten";
  if (!output.inputs_unchanged) return "an input was written to";
  const QuantizedLayout layout = layout_of(c);
  std::string text = pad_violation(c, layout, c.layout, output.tensor.scales);
  if (text.empty() && c.extra_layout) {
    text = pad_violation(c, layout, *c.extra_layout, output.extra_scales);
  }
  if (text.empty()) text = value_violation(c, layout, output, poison);
  if (text.empty()) text = row_scale_violation(c, output);
  if (text.empty()) text = finite_violation(c, layout, output);
  return text;
}

std::string difference(const QuantizeCase& c, const QuantizeOutput& expected,
                       const QuantizeOutput& actual) {
  std::string text = first_difference("scales", expected.tensor.scales, actual.tensor.scales);
  if (text.empty()) text = value_difference(c, expected, actual);
  if (text.empty()) {
    text =
        first_difference("global_scale", expected.tensor.global_scale, actual.tensor.global_scale);
  }
  if (text.empty()) {
    text = first_difference("extra_scales", expected.extra_scales, actual.extra_scales);
  }
  if (text.empty()) {
    text = first_difference("norm_output", expected.norm_output, actual.norm_output);
  }
  if (text.empty()) text = first_difference("residual", expected.residual, actual.residual);
  return text;
}

bool is_mistrusted(const QuantizeCase& c, const QuantizeOutput& output) {
  const QuantizedLayout layout = layout_of(c);
  const bool is_packed = format_info(c.format).element_bits == 4;
  const Matrix input = input_of(c);
  int64_t zeros = 0;
  int64_t total = 0;
  for (int64_t row = 0; row < c.batch * c.rows; ++row) {
    if (!c.is_visited(row / c.rows, row % c.rows)) continue;
    const ByteRow codes = value_row(layout, output, row);
    // One column in five says as much as all.
    for (int64_t col = row % 5; col < c.cols; col += 5) {
      if (input.at(row, col) == 0.0F) continue;
      const uint8_t byte = codes[static_cast<size_t>(is_packed ? col / 2 : col)];
      const int code = is_packed ? (col % 2 == 0 ? byte & 0x7 : byte >> 4 & 0x7) : byte & 0x7F;
      zeros += code == 0 ? 1 : 0;
      ++total;
    }
  }
  return zeros * 10 > total * 3;
}

bool is_typical(const QuantizeCase& c) {
  const bool is_given = c.encode_scale || !c.encode_scales.empty() || c.base_decode_scale ||
                        c.fp8_decode_scale || c.fp8_eps;
  const bool is_dense = c.fill == Fill::kNormal || c.fill == Fill::kQuarterIntegers ||
                        c.fill == Fill::kIntegers || c.fill == Fill::kAllEqual;
  return is_dense && !is_given && c.source == RowSourceKind::kPlain;
}

int64_t num_blocks(const QuantizeCase& c) {
  const FormatInfo& info = format_info(c.format);
  if (info.block_rows == 0) return c.batch;
  const int64_t row_blocks = (c.rows + info.block_rows - 1) / info.block_rows;
  return c.batch * row_blocks * ((c.cols + info.block_cols - 1) / info.block_cols);
}

}  // namespace narrowfloat::testing
