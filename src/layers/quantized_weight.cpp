// The public operations quantize and dequantize; this file adds what only files need: linear
// scales, the direction of the global scale, and no zero scales.
#include "layers/quantized_weight.h"

#include <cmath>
#include <cstring>

#include "base/assert.h"
#include "base/int_math.h"
#include "base/throw_error.h"
#include "formats/fp8_block.h"
#include "formats/nvfp4.h"
#include "formats/ue8m0.h"
#include "layers/scale_search.h"
#include "runtime/float_environment.h"
#include "runtime/parallel.h"
#include "tensor/element_io.h"

namespace narrowfloat {
namespace {

constexpr int64_t kBlockGrain = 1024;

QuantizedLayout file_layout(const ConventionSpec& spec, int64_t rows, int64_t cols) {
  return quantized_layout(spec.info.format, rows, cols,
                          {.scale_layout = ScaleLayoutId::kLinear, .batch = 1, .alignment = 32});
}

// A search leaves room above the scale of a block, so the tensor maximum maps to 256 * 6
// (ModelOpt's choice). 4-over-6 compares squared errors, too.
constexpr int kSearchMax = 256;

FourOverSix four_over_six(const EncodeSettings& settings) {
  if (settings.scale_search != ScaleSearch::kFourOverSix) return {};
  return {.enabled = true,
          .error = FourOverSixError::kMse,
          .error_math = FourOverSixMath::kStrict,
          .e4m3_max = kSearchMax};
}

// Writes the codes of one block of 16 for a given stored scale.
template <class Math>
void encode_block(const float* x, uint8_t stored_scale, float encode_scale, std::byte* codes) {
  const ScalePair pair = Nvfp4::scale_pair<Math>(encode_scale);
  const float multiplier = Nvfp4::multiplier<Math>(stored_scale, pair);
  for (int64_t i = 0; i < Nvfp4::kBlockCols; i += 2) {
    const uint8_t even = Nvfp4::encode<Math>(x[i], multiplier);
    const uint8_t odd = Nvfp4::encode<Math>(x[i + 1], multiplier);
    codes[i / 2] = static_cast<std::byte>(even | odd << 4);
  }
}

void replace_zero_scales(const TensorView& input, MathMode math, float encode_scale,
                         QuantizedWeight& output) {
  const ZeroScaleBytes& replacement = *output.spec().zero_scales;
  const std::span<std::byte> scales = output.scales();
  const std::span<std::byte> values = output.values();
  constexpr int64_t kCols = Nvfp4::kBlockCols;
  // Rows are dense, so block b of the range starts at element 16 * b.
  parallel_for(static_cast<int64_t>(scales.size()), kBlockGrain, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      std::byte& scale = scales[static_cast<size_t>(block)];
      if (scale != std::byte{0}) continue;
      float x[kCols];
      widen(input.dtype, element_pointer(input.data, input.dtype, block * kCols), kCols, x);
      bool is_zero = true;
      for (const float element : x) is_zero = is_zero && element == 0.0F;
      const uint8_t stored = is_zero ? replacement.zero_block : replacement.underflow;
      scale = static_cast<std::byte>(stored);
      std::byte* codes = &values[static_cast<size_t>(block * kCols / 2)];
      if (math == MathMode::kExact) {
        encode_block<ExactMath>(x, stored, encode_scale, codes);
      } else {
        encode_block<FastMath>(x, stored, encode_scale, codes);
      }
    }
  });
}

// The rule `reciprocal` of FP8; the quantizer takes and the file stores the decode scale.
TensorScale fp8_scale(float amax) {
  return in_float_environment([&] {
    const BlockRules rules = {.input_max = kFloatMax};
    const float stored = Fp8Tensor::block_scale<ExactMath>(amax, {}, rules).stored;
    return TensorScale{stored, stored};
  });
}

// Each row is a tensor of its own, or all rows are one with the given scale.
void encode_whole_rows(const TensorView& input, MathMode math, float decode_scale,
                       QuantizedWeight& output) {
  const bool is_per_row = output.spec().info.scale_extent == ScaleExtent::kRow;
  const int64_t tensors = is_per_row ? output.rows() : 1;
  const int64_t rows = is_per_row ? 1 : output.rows();
  const QuantizedLayout layout =
      quantized_layout(FormatId::kFp8Tensor, rows, output.cols(),
                       {.scale_layout = ScaleLayoutId::kLinear, .batch = tensors});
  QuantizeOptions options;
  options.math = math;
  if (!is_per_row) options.fp8_decode_scale = decode_scale;
  std::vector<float> scales(static_cast<size_t>(tensors));
  quantize(TensorView::contiguous(input.data, input.dtype, {tensors, rows, output.cols()}),
           layout.bind(output.values().data(), scales.data(), nullptr), options);
  output.set_whole_scales(scales);
}

// Bytes of the block scales in memory.
size_t scales_bytes(const ConventionSpec& spec, const QuantizedLayout& layout) {
  const auto bytes = static_cast<size_t>(layout.scales_bytes);
  return spec.info.is_integer ? bytes * sizeof(float) : bytes;
}

}  // namespace

QuantizedWeight::QuantizedWeight(const ConventionSpec& spec, int64_t rows, int64_t cols,
                                 float global_scale)
    : spec_(spec),
      layout_(file_layout(spec, rows, cols)),
      values_(static_cast<size_t>(layout_.values_bytes)),
      scales_(scales_bytes(spec, layout_)),
      global_scale_(global_scale) {}

void QuantizedWeight::set_rows(int64_t rows) {
  layout_ = file_layout(spec_, rows, layout_.cols);
  NF_ASSERT(static_cast<size_t>(layout_.values_bytes) <= values_.size());
}

std::span<std::byte> QuantizedWeight::values() {
  return std::span(values_).first(static_cast<size_t>(layout_.values_bytes));
}

std::span<std::byte> QuantizedWeight::scales() {
  return std::span(scales_).first(scales_bytes(spec_, layout_));
}

void QuantizedWeight::set_whole_scales(std::span<const float> scales) {
  const bool is_per_row = spec_.info.scale_extent == ScaleExtent::kRow;
  const auto blocks = static_cast<size_t>(layout_.scale_blocks);
  for (size_t row = 0; row < static_cast<size_t>(layout_.rows); ++row) {
    const float scale = scales[is_per_row ? row : 0];
    for (size_t block = row * blocks; block < (row + 1) * blocks; ++block) {
      std::memcpy(&scales_[block * sizeof(float)], &scale, sizeof(float));
    }
  }
}

std::span<const std::byte> QuantizedWeight::stored_scales(int64_t first) {
  const ScaleExtent extent = spec_.info.scale_extent;
  if (extent == ScaleExtent::kBlock) return scales();
  const bool is_later_range = extent == ScaleExtent::kTensor && first > 0;
  if (is_later_range) return {};
  const auto count = static_cast<size_t>(extent == ScaleExtent::kRow ? layout_.rows : 1);
  const auto row_bytes = static_cast<size_t>(layout_.scale_blocks) * sizeof(float);
  const float of_no_elements = 1;
  stored_scales_.resize(count * sizeof(float));
  for (size_t i = 0; i < count; ++i) {
    const void* const scale =
        scales().empty() ? static_cast<const void*>(&of_no_elements) : &scales_[i * row_bytes];
    std::memcpy(&stored_scales_[i * sizeof(float)], scale, sizeof(float));
  }
  return stored_scales_;
}

QuantizedView QuantizedWeight::view(float* global_scale) {
  return layout_.bind(values_.data(), scales_.data(), global_scale);
}

void QuantizedWeight::decode(const TensorView& output) { decode_with(global_scale_, output); }

void QuantizedWeight::decode_with(float global_scale, const TensorView& output) {
  if (spec_.info.is_integer) {
    decode_integers(output);
    return;
  }
  DequantizeOptions options;
  options.global_scale_divides = spec_.global_sense == GlobalScaleSense::kEncode;
  dequantize(view(&global_scale), output, options);
}

void QuantizedWeight::decode_integers(const TensorView& output) const {
  const int64_t cols = layout_.cols;
  parallel_for(layout_.rows, row_grain(kBlockGrain, cols), [&](int64_t begin, int64_t end) {
    std::vector<float> values(static_cast<size_t>(cols));
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t col = 0; col < cols; ++col) {
        const float scale = decode_scale(row, col / format_info(spec_.info.format).block_cols);
        values[static_cast<size_t>(col)] = code_value(row, col) * scale;
      }
      narrow(output.dtype, values.data(), cols,
             element_pointer(output.data, output.dtype, row * cols));
    }
  });
}

float QuantizedWeight::code_value(int64_t row, int64_t col) const {
  const FormatInfo& format = format_info(spec_.info.format);
  const bool is_packed = format.element_bits == 4;
  const int64_t index = row * layout_.cols + col;
  const auto stored =
      static_cast<unsigned>(values_[static_cast<size_t>(index / (is_packed ? 2 : 1))]);
  if (!is_packed) return E4M3::decode(static_cast<uint8_t>(stored));
  const auto code = static_cast<uint8_t>(stored >> (index % 2 * 4) & 0xFU);
  return spec_.info.is_integer ? static_cast<float>(static_cast<int>(code) - 8)
                               : E2M1::decode(code);
}

double QuantizedWeight::value(int64_t row, int64_t col) const {
  const int64_t block = col / format_info(spec_.info.format).block_cols;
  return static_cast<double>(code_value(row, col)) * static_cast<double>(decode_scale(row, block));
}

float QuantizedWeight::decode_scale(int64_t row, int64_t block) const {
  double scale = 0;
  decode_scales(row, block, std::span(&scale, 1));
  return static_cast<float>(scale);
}

void QuantizedWeight::decode_scales(int64_t row, int64_t first_block,
                                    std::span<double> scales) const {
  const FormatInfo& format = format_info(spec_.info.format);
  const int64_t index = row / format.block_rows * layout_.scale_blocks + first_block;
  const std::byte* stored = scales_.data() + index * bytes(scale_type_of(spec_));
  const auto decode = [&](auto decode_one) {
    for (double& scale : scales) {
      scale = static_cast<double>(decode_one(static_cast<uint8_t>(*stored)));
      ++stored;
    }
  };
  if (scale_type_of(spec_) == ScaleType::kF32) {
    for (double& scale : scales) {
      float one = 0;
      std::memcpy(&one, stored, sizeof(one));
      scale = static_cast<double>(one);
      stored += sizeof(one);
    }
  } else if (format.scale_type == ScaleType::kUE8M0) {
    decode([](uint8_t code) { return UE8M0::decode(code); });
  } else if (spec_.global_sense == GlobalScaleSense::kEncode) {
    decode([this](uint8_t code) { return E4M3::decode(code) / global_scale_; });
  } else {
    decode([this](uint8_t code) { return E4M3::decode(code) * global_scale_; });
  }
}

ClipLimits QuantizedWeight::clip_limits() const {
  const FormatInfo& format = format_info(spec_.info.format);
  constexpr double kMaxInt4 = 8;  // The codes reach from -8 to 7.
  const double largest = spec_.info.is_integer      ? kMaxInt4
                         : format.element_bits == 4 ? E2M1::kMaxFinite
                                                    : E4M3::kMaxFinite;
  return {.block_cols = format.block_cols,
          .of_blocks = [this, largest](int64_t row, int64_t first_block, std::span<double> limits) {
            decode_scales(row, first_block, limits);
            for (double& limit : limits) limit *= largest;
          }};
}

uint64_t QuantizedWeight::buffer_bytes(const ConventionSpec& spec, int64_t rows, int64_t cols) {
  const QuantizedLayout layout = file_layout(spec, rows, cols);
  return static_cast<uint64_t>(layout.values_bytes) + scales_bytes(spec, layout);
}

uint64_t QuantizedWeight::stored_bytes(const ConventionSpec& spec, int64_t rows, int64_t cols) {
  if (spec.info.scale_extent == ScaleExtent::kBlock) return buffer_bytes(spec, rows, cols);
  const bool is_per_row = spec.info.scale_extent == ScaleExtent::kRow;
  return static_cast<uint64_t>(rows * cols) +
         static_cast<uint64_t>(is_per_row ? rows : 1) * sizeof(float);
}

TensorScale tensor_scale(const ConventionSpec& spec, const EncodeSettings& settings, float amax) {
  if (spec.info.scale_extent == ScaleExtent::kTensor) return fp8_scale(amax);
  if (spec.global_sense == GlobalScaleSense::kNone) return {};
  const int e4m3_max = settings.scale_search == ScaleSearch::kAmax ? 448 : kSearchMax;
  const float encode_scale = encode_scale_from_amax(amax, e4m3_max);
  if (spec.global_sense == GlobalScaleSense::kEncode) return {encode_scale, encode_scale};
  // This is ModelOpt's own formula; it overflows at the ends of fp32's range, where the reciprocal
  // replaces it.
  const float decode_scale = amax / (static_cast<float>(e4m3_max) * E2M1::kMaxFinite);
  return {encode_scale,
          std::isnormal(decode_scale) ? decode_scale : decode_scale_from_encode(encode_scale)};
}

void encode(const TensorView& input, const EncodeSettings& settings, float encode_scale,
            QuantizedWeight& output, std::span<const float> col_weights) {
  if (output.spec().info.scale_extent != ScaleExtent::kBlock) {
    encode_whole_rows(input, settings.math, encode_scale, output);
    return;
  }
  QuantizeOptions options;
  options.math = settings.math;
  options.mx_scale = settings.mx_scale;
  const bool has_global_scale = output.spec().global_sense != GlobalScaleSense::kNone;
  if (has_global_scale) {
    options.encode_scale = encode_scale;
    options.four_over_six = four_over_six(settings);
  }
  // The quantizer returns its own decode scale; the file holds the convention's.
  float decode_scale = 0;
  quantize(input, output.view(has_global_scale ? &decode_scale : nullptr), options);
  if (output.spec().zero_scales) {
    replace_zero_scales(input, settings.math, encode_scale, output);
  }
  if (settings.scale_search == ScaleSearch::kFull) {
    search_scales(input, settings.math, encode_scale, col_weights, output);
  }
}

}  // namespace narrowfloat
