// See expert_loader.h.
#include "layers/moe/expert_loader.h"

#include <cstring>

#include "base/bad_enumerator.h"
#include "base/int_math.h"
#include "base/throw_error.h"
#include "checkpoint/conventions/convention.h"
#include "checkpoint/escape.h"
#include "formats/float16.h"
#include "layers/weight_reader.h"
#include "runtime/parallel.h"
#include "tensor/element_io.h"

namespace narrowfloat {
namespace {

constexpr int64_t kConvertGrain = 1 << 16;

// How a weight format lies in memory. block_rows 0: no block scales.
struct FormatSizes {
  DType values = DType::kBF16;
  int64_t block_rows = 0;
  int64_t block_cols = 0;
  ScaleType scale_type = ScaleType::kF32;
};

FormatSizes sizes(WeightFormat format) {
  switch (format) {
    case WeightFormat::kBf16:
      return {.values = DType::kBF16};
    case WeightFormat::kFp8Tensor:
      return {.values = DType::kF8E4M3};
    case WeightFormat::kFp8Block:
      return {DType::kF8E4M3, 128, 128, ScaleType::kF32};
    case WeightFormat::kMxfp8:
      return {DType::kF8E4M3, 1, 32, ScaleType::kUE8M0};
    case WeightFormat::kMxfp4:
      return {DType::kU8, 1, 32, ScaleType::kUE8M0};
    case WeightFormat::kNvfp4:
      return {DType::kU8, 1, 16, ScaleType::kE4M3};
  }
  throw_bad_enumerator("weight format", static_cast<int>(format));
}

FormatId quantizer_format(WeightFormat format) {
  switch (format) {
    case WeightFormat::kBf16:
      break;
    case WeightFormat::kFp8Tensor:
      return FormatId::kFp8Tensor;
    case WeightFormat::kFp8Block:
      return FormatId::kFp8Block128x128;
    case WeightFormat::kMxfp8:
      return FormatId::kMxfp8;
    case WeightFormat::kMxfp4:
      return FormatId::kMxfp4;
    case WeightFormat::kNvfp4:
      return FormatId::kNvfp4;
  }
  throw_bad_enumerator("quantized weight format", static_cast<int>(format));
}

int64_t row_bytes(const StackedWeight& weight) {
  return sizes(weight.format).values == DType::kU8
             ? weight.cols / 2
             : weight.cols * bits(sizes(weight.format).values) / 8;
}

int64_t scale_rows(const StackedWeight& weight, int64_t rows) {
  const FormatSizes format = sizes(weight.format);
  return format.block_rows == 0 ? 0 : ceil_div(rows, format.block_rows);
}

int64_t scale_row_bytes(const StackedWeight& weight) {
  const FormatSizes format = sizes(weight.format);
  if (format.block_rows == 0) return 0;
  return ceil_div(weight.cols, format.block_cols) * bytes(format.scale_type);
}

void to_bf16(const TensorView& plain, std::byte* out) {
  parallel_for(plain.num_elements(), kConvertGrain, [&](int64_t begin, int64_t end) {
    constexpr int64_t kChunk = 256;
    float wide[kChunk];
    for (int64_t i = begin; i < end; i += kChunk) {
      const int64_t count = std::min(kChunk, end - i);
      widen(plain.dtype, element_pointer(plain.data, plain.dtype, i), count, wide);
      narrow(DType::kBF16, wide, count, element_pointer(out, DType::kBF16, i));
    }
  });
}

}  // namespace

WeightFormat weight_format(Convention convention) {
  switch (convention) {
    case Convention::kNvfp4CompressedTensors:
    case Convention::kNvfp4ModelOpt:
      return WeightFormat::kNvfp4;
    case Convention::kMxfp4CompressedTensors:
      return WeightFormat::kMxfp4;
    case Convention::kMxfp8CompressedTensors:
      return WeightFormat::kMxfp8;
    case Convention::kFp8Block:
      return WeightFormat::kFp8Block;
  }
  throw_bad_enumerator("convention", static_cast<int>(convention));
}

StackedWeight::StackedWeight(WeightFormat weight_format, int64_t num_experts, int64_t num_rows,
                             int64_t num_cols)
    : format(weight_format), experts(num_experts), rows(num_rows), cols(num_cols) {
  values.resize(static_cast<size_t>(experts * rows * row_bytes(*this)));
  scales.resize(static_cast<size_t>(experts * scale_rows(*this, rows) * scale_row_bytes(*this)));
}

WeightView StackedWeight::view() const {
  const FormatSizes layout = sizes(format);
  const int64_t stored_cols = layout.values == DType::kU8 ? cols / 2 : cols;
  WeightView result;
  result.values =
      TensorView::contiguous(values.data(), layout.values, {experts, rows, stored_cols});
  if (layout.block_rows == 0) return result;
  // Operations never write through the views of their inputs.
  result.scales.data = const_cast<std::byte*>(scales.data());
  result.scales.type = layout.scale_type;
  result.scales.layout = ScaleLayoutId::kLinear;
  result.scales.batch = experts;
  result.scales.rows = scale_rows(*this, rows);
  result.scales.blocks = ceil_div(cols, layout.block_cols);
  result.scales.capacity = experts * result.scales.rows * result.scales.blocks;
  return result;
}

ExpertLoader::ExpertLoader(const Checkpoint& checkpoint, StackedWeight& target)
    : checkpoint_(checkpoint), target_(target) {}

ExpertLoader::Place ExpertLoader::place(int64_t expert, int64_t first_row, int64_t rows) {
  const int64_t value_row = expert * target_.rows + first_row;
  const int64_t scale_row =
      expert * scale_rows(target_, target_.rows) + scale_rows(target_, first_row);
  return {target_.values.data() + value_row * row_bytes(target_),
          target_.scales.data() + scale_row * scale_row_bytes(target_),
          static_cast<size_t>(rows * row_bytes(target_)),
          static_cast<size_t>(scale_rows(target_, rows) * scale_row_bytes(target_))};
}

float ExpertLoader::load(const LogicalTensor& weight, int64_t expert, int64_t first_row,
                         int64_t rows) {
  if (weight.shape != std::vector<int64_t>{rows, target_.cols}) {
    throw_error(ErrorKind::kCorruptData, "{}: tensor '{}': expected [{}, {}] as its neighbours",
                printable(checkpoint_.path()), printable(weight.name), rows, target_.cols);
  }
  const Place where = place(expert, first_row, rows);
  return weight.convention ? load_coded(weight, where, rows) : load_plain(weight, where, rows);
}

float ExpertLoader::load_plain(const LogicalTensor& weight, const Place& place, int64_t rows) {
  const CheckpointTensor& tensor = *checkpoint_.find(weight.name);
  PlainReader reader(checkpoint_, tensor, rows);
  reader.load(0, rows);
  const TensorView plain = reader.view();
  if (target_.format == WeightFormat::kBf16) {
    to_bf16(plain, place.values);
    return 1.0F;
  }
  const QuantizedLayout layout =
      quantized_layout(quantizer_format(target_.format), rows, target_.cols,
                       {.scale_layout = ScaleLayoutId::kLinear, .batch = 1, .alignment = 32});
  float global_scale = 1.0F;
  const bool has_tensor_scale = target_.format == WeightFormat::kFp8Tensor;
  void* scales = has_tensor_scale ? static_cast<void*>(&global_scale) : place.scales;
  quantize(plain,
           layout.bind(place.values, scales, layout.global_scales > 0 ? &global_scale : nullptr));
  return global_scale;
}

float ExpertLoader::load_coded(const LogicalTensor& weight, const Place& place, int64_t rows) {
  const WeightFormat stored = weight_format(*weight.convention);
  if (stored != target_.format) {
    throw_invalid(
        "mode: tensor '{}' is stored as {}, but the mode computes with {} weights; choose "
        "a mode with {} weights, or load the unquantized model",
        printable(weight.name), name(stored), name(target_.format), name(stored));
  }
  CodedReader reader(checkpoint_, weight, rows);
  reader.load(0, rows);
  CodedWeight& coded = reader.coded();
  std::memcpy(place.values, coded.values().data(), place.values_bytes);
  std::memcpy(place.scales, coded.scales().data(), place.scales_bytes);
  const bool divides = coded.spec().global_sense == GlobalScaleSense::kEncode;
  return divides ? decode_scale_from_encode(coded.global_scale()) : coded.global_scale();
}

}  // namespace narrowfloat
