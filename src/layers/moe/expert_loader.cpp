// See expert_loader.h.
#include "layers/moe/expert_loader.h"

#include <cstring>

#include <fmt/ranges.h>

#include "base/bad_enumerator.h"
#include "base/throw_error.h"
#include "checkpoint/conventions/convention.h"
#include "checkpoint/escape.h"
#include "formats/float16.h"
#include "layers/weight_reader.h"
#include "runtime/parallel.h"
#include "tensor/code_storage.h"
#include "tensor/element_io.h"

namespace narrowfloat {
namespace {

constexpr int64_t kConvertGrain = 1 << 16;

// The quantizer's format for unquantized weights.
FormatId quantizer_format(WeightFormat format) {
  return format == WeightFormat::kFp8Tensor ? FormatId::kFp8Tensor : *storage_of(format).scales;
}

int64_t row_bytes(const StackedWeight& weight) {
  return weight.cols * code_bits(storage_of(weight.format).dtype) / 8;
}

// The scale grid of the first `rows` rows of one expert.
ScaleGrid grid(const StackedWeight& weight, int64_t rows) {
  return scale_grid(storage_of(weight.format), rows, weight.cols);
}

int64_t num_rows(const MatrixPart& part) {
  int64_t rows = 0;
  for (const MatrixRows& range : part.rows) rows += range.count;
  return rows;
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

void require_float(const Checkpoint& checkpoint, const CheckpointTensor& tensor) {
  const DType dtype = tensor.info.dtype;
  if (dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16) return;
  throw_error(ErrorKind::kUnsupported, "{}: tensor '{}': expected F32, BF16 or F16, got {}",
              printable(checkpoint.path()), printable(tensor.info.name), name(dtype));
}

WeightFormat weight_format(Convention convention) {
  switch (convention) {
    case Convention::kNvfp4CompressedTensors:
    case Convention::kNvfp4ModelOpt:
      return WeightFormat::kNvfp4;
    case Convention::kMxfp4CompressedTensors:
    case Convention::kMxfp4GptOss:
    case Convention::kMxfp4DeepSeek:
      return WeightFormat::kMxfp4;
    case Convention::kMxfp8CompressedTensors:
      return WeightFormat::kMxfp8;
    case Convention::kFp8Block:
      return WeightFormat::kFp8Block;
    case Convention::kInt4CompressedTensors:
    case Convention::kFp8Channel:
    case Convention::kFp8Tensor:
    case Convention::kFp8ChannelModelOpt:
    case Convention::kFp8TensorModelOpt:
      throw_error(ErrorKind::kUnsupported,
                  "a MoeLayer has no mode for weights in {}; convert the checkpoint, or dequantize "
                  "it",
                  convention_info(convention).name);
  }
  throw_bad_enumerator("convention", static_cast<int>(convention));
}

StackedWeight::StackedWeight(WeightFormat weight_format, int64_t num_experts, int64_t num_rows,
                             int64_t num_cols)
    : format(weight_format), experts(num_experts), rows(num_rows), cols(num_cols) {
  values.resize(static_cast<size_t>(experts * rows * row_bytes(*this)));
  scales.resize(static_cast<size_t>(experts * grid(*this, rows).size_bytes()));
}

WeightView StackedWeight::view() const {
  const CodeStorage storage = storage_of(format);
  const int64_t stored_cols = storage.dtype == DType::kU8 ? cols / 2 : cols;
  WeightView result;
  result.values =
      TensorView::contiguous(values.data(), storage.dtype, {experts, rows, stored_cols});
  const ScaleGrid blocks = grid(*this, rows);
  if (!blocks.is_present()) return result;
  // Operations never write through the views of their inputs.
  result.scales.data = const_cast<std::byte*>(scales.data());
  result.scales.type = blocks.type;
  result.scales.layout = ScaleLayoutId::kLinear;
  result.scales.batch = experts;
  result.scales.rows = blocks.rows;
  result.scales.blocks = blocks.blocks;
  result.scales.capacity = experts * blocks.rows * blocks.blocks;
  return result;
}

ExpertLoader::ExpertLoader(const Checkpoint& checkpoint, StackedWeight& target)
    : checkpoint_(checkpoint), target_(target) {}

ExpertLoader::Place ExpertLoader::place(int64_t expert, int64_t first_row, int64_t rows) {
  const int64_t value_row = expert * target_.rows + first_row;
  const int64_t scales_before =
      expert * grid(target_, target_.rows).size_bytes() + grid(target_, first_row).size_bytes();
  return {target_.values.data() + value_row * row_bytes(target_),
          target_.scales.data() + scales_before, static_cast<size_t>(rows * row_bytes(target_)),
          static_cast<size_t>(grid(target_, rows).size_bytes())};
}

float ExpertLoader::load(const LogicalTensor& weight, const std::vector<int64_t>& shape,
                         const MatrixPart& part, int64_t expert, int64_t first_row) {
  if (weight.shape != shape) {
    throw_error(ErrorKind::kCorruptData, "{}: tensor '{}': expected [{}] as its neighbours",
                printable(checkpoint_.path()), printable(weight.name), fmt::join(shape, ", "));
  }
  if (weight.convention) return load_coded(weight, part, 0, expert, first_row);
  const CheckpointTensor& tensor = *checkpoint_.find(weight.name);
  require_float(checkpoint_, tensor);
  const std::vector<std::byte> plain = read_plain(tensor, part, 0);
  const int64_t rows = num_rows(part);
  return code_plain(TensorView::contiguous(plain.data(), weight.dtype, {rows, target_.cols}),
                    place(expert, first_row, rows));
}

float ExpertLoader::load_stacked(const StackedSource& source, const MatrixPart& part, int64_t id,
                                 int64_t expert) {
  const LogicalTensor& weight = source.weight;
  if (weight.convention) return load_coded(weight, part, id * source.rows, expert, 0);
  const CheckpointTensor& tensor = *checkpoint_.find(weight.name);
  require_float(checkpoint_, tensor);
  const std::vector<std::byte> plain = source.is_transposed
                                           ? read_transposed(tensor, part, id * source.cols)
                                           : read_plain(tensor, part, id * source.rows);
  const int64_t rows = target_.rows;
  return code_plain(TensorView::contiguous(plain.data(), weight.dtype, {rows, target_.cols}),
                    place(expert, 0, rows));
}

std::vector<std::byte> ExpertLoader::read_plain(const CheckpointTensor& tensor,
                                                const MatrixPart& part, int64_t before) {
  std::vector<std::byte> plain;
  for (const MatrixRows& range : part.rows) {
    PlainReader reader(checkpoint_, tensor, range.count, ColumnRange{part.first_col, target_.cols});
    reader.load(before + range.first, range.count);
    const std::span<const std::byte> rows = reader.bytes();
    plain.insert(plain.end(), rows.begin(), rows.end());
  }
  loaded_bytes_ += plain.size();
  return plain;
}

std::vector<std::byte> ExpertLoader::read_transposed(const CheckpointTensor& tensor,
                                                     const MatrixPart& part, int64_t before) {
  std::vector<std::byte> plain;
  for (const MatrixRows& range : part.rows) {
    PlainReader reader(checkpoint_, tensor, target_.cols, ColumnRange{range.first, range.count});
    reader.load(before + part.first_col, target_.cols);
    const std::span<const std::byte> stored = reader.bytes();
    const size_t begin = plain.size();
    plain.resize(begin + stored.size());
    transpose_experts({.experts = 1, .rows = target_.cols, .cols = range.count}, tensor.info.dtype,
                      stored, std::span(plain).subspan(begin));
  }
  loaded_bytes_ += plain.size();
  return plain;
}

float ExpertLoader::code_plain(const TensorView& plain, const Place& place) const {
  if (target_.format == WeightFormat::kBf16) {
    to_bf16(plain, place.values);
    return 1.0F;
  }
  const QuantizedLayout layout =
      quantized_layout(quantizer_format(target_.format), plain.shape[0], target_.cols,
                       {.scale_layout = ScaleLayoutId::kLinear, .batch = 1, .alignment = 32});
  float global_scale = 1.0F;
  const bool has_tensor_scale = target_.format == WeightFormat::kFp8Tensor;
  void* scales = has_tensor_scale ? static_cast<void*>(&global_scale) : place.scales;
  quantize(plain,
           layout.bind(place.values, scales, layout.global_scales > 0 ? &global_scale : nullptr));
  return global_scale;
}

float ExpertLoader::load_coded(const LogicalTensor& weight, const MatrixPart& part, int64_t before,
                               int64_t expert, int64_t first_row) {
  const WeightFormat stored = weight_format(*weight.convention);
  if (stored != target_.format) {
    throw_invalid(
        "mode: tensor '{}' is stored as {}, but the mode computes with {} weights; choose "
        "a mode with {} weights, or load the unquantized model",
        printable(weight.name), name(stored), name(target_.format), name(stored));
  }
  QuantizedReader reader(checkpoint_, weight, num_rows(part),
                         ColumnRange{part.first_col, target_.cols});
  QuantizedWeight& coded = reader.coded();
  for (const MatrixRows& range : part.rows) {
    const Place where = place(expert, first_row, range.count);
    reader.load(before + range.first, range.count);
    std::memcpy(where.values, coded.values().data(), where.values_bytes);
    std::memcpy(where.scales, coded.scales().data(), where.scales_bytes);
    first_row += range.count;
  }
  loaded_bytes_ += reader.loaded_bytes();
  const bool divides = coded.spec().global_sense == GlobalScaleSense::kEncode;
  return divides ? decode_scale_from_encode(coded.global_scale()) : coded.global_scale();
}

}  // namespace narrowfloat
