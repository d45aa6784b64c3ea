// Codes cover four octaves, FP4 all codes; scales two octaves.
#include "cli_common/moe/random_weights.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace narrowfloat::cli {
namespace {

// Root mean squares of the codes as fill_words() draws them.
constexpr double kFp4Rms = 2.926;       // All sixteen codes alike.
constexpr double kFp8Rms = 13.5;        // 2 to 30, uniform in the code.
constexpr double kBf16Rms = 7.05;       // Times 2^exponent of the lowest octave.
constexpr double kE4m3ScaleRms = 2.32;  // Block scales 1 to 3.75, uniform in the code.

// A number in (0, 1).
double uniform(uint64_t seed, uint64_t index) {
  return (static_cast<double>(random_word_bits(seed, index) >> 11U) + 0.5) * 0x1p-53;
}

// The sum of four uniform numbers of 16 bits, scaled to variance 1.
float normal(uint64_t seed, uint64_t index) {
  constexpr double kScale = 1.7320508075688772 / 65536;
  const uint64_t bits = random_word_bits(seed, index);
  const uint64_t sum =
      (bits & 0xFFFFU) + (bits >> 16U & 0xFFFFU) + (bits >> 32U & 0xFFFFU) + (bits >> 48U);
  return static_cast<float>((static_cast<double>(sum) - 2 * 65535.0) * kScale);
}

// The same 8 or 16 bits in every element of a word.
uint64_t repeated8(uint64_t bits) { return bits * 0x0101010101010101ULL; }
uint64_t repeated16(uint64_t bits) { return bits * 0x0001000100010001ULL; }

// The exponent of the power of two nearest to 1 / (rms * sqrt(cols)).
int scale_exponent(double rms, int64_t cols) {
  return static_cast<int>(std::lround(-std::log2(rms * std::sqrt(static_cast<double>(cols)))));
}

}  // namespace

struct RandomWeights::Storage {
  DType dtype;
  int element_bits;
  int64_t block_rows, block_cols;  // 0: no block scales.
  ScaleType scale_type;
  double rms;
};

namespace {

using Storage = RandomWeights::Storage;

Storage storage_of(WeightFormat format) {
  switch (format) {
    case WeightFormat::kBf16:
      return {DType::kBF16, 16, 0, 0, ScaleType::kF32, kBf16Rms};
    case WeightFormat::kFp8Tensor:
      return {DType::kF8E4M3, 8, 0, 0, ScaleType::kF32, kFp8Rms};
    case WeightFormat::kFp8Block:
      return {DType::kF8E4M3, 8, 128, 128, ScaleType::kF32, kFp8Rms};
    case WeightFormat::kMxfp8:
      return {DType::kF8E4M3, 8, 1, 32, ScaleType::kUE8M0, kFp8Rms};
    case WeightFormat::kMxfp4:
      return {DType::kU8, 4, 1, 32, ScaleType::kUE8M0, kFp4Rms};
    case WeightFormat::kNvfp4:
      return {DType::kU8, 4, 1, 16, ScaleType::kE4M3, kFp4Rms * kE4m3ScaleRms};
  }
  return {};
}

// Storage of rows, whose scales are those of one row.
Storage storage_of(RowFormat format) {
  switch (format) {
    case RowFormat::kBf16:
      return storage_of(WeightFormat::kBf16);
    case RowFormat::kFp32:
      return {DType::kF32, 32, 0, 0, ScaleType::kF32, 0};
    case RowFormat::kFp8Static:
    case RowFormat::kFp8Token:
      return storage_of(WeightFormat::kFp8Tensor);
    case RowFormat::kFp8Group:
      return {DType::kF8E4M3, 8, 1, 128, ScaleType::kF32, kFp8Rms};
    case RowFormat::kMxfp8:
      return storage_of(WeightFormat::kMxfp8);
    case RowFormat::kNvfp4:
    case RowFormat::kNvfp4PerToken:
      return storage_of(WeightFormat::kNvfp4);
  }
  return {};
}

RandomWords element_words(const Storage& storage, int64_t cols, uint64_t seed) {
  if (storage.element_bits == 4) return {.seed = seed};
  // Sign, two bits of exponent and the mantissa are random; FP8 starts at 2.
  if (storage.element_bits == 8) return {seed, repeated8(0x9F), repeated8(0x40)};
  const int exponent = 127 + scale_exponent(storage.rms, cols);
  return {seed, repeated16(0x81FF), repeated16(static_cast<uint64_t>(exponent) << 7U)};
}

// Words of scales of one byte.
RandomWords scale_words(const Storage& storage, int64_t cols, uint64_t seed) {
  if (storage.scale_type == ScaleType::kE4M3) return {seed, repeated8(0x0F), repeated8(0x38)};
  const int lowest = 127 + scale_exponent(storage.rms, cols) - 1;
  return {seed, repeated8(0x01), repeated8(static_cast<uint64_t>(lowest))};
}

int64_t fc1_rows(const MoeConfig& config) {
  return activation_info(config.activation.kind).is_gated ? 2 * config.inter : config.inter;
}

uint64_t size_of(const TensorView& view) {
  return view.is_absent() ? 0 : static_cast<uint64_t>(view.num_elements() * bits(view.dtype) / 8);
}
uint64_t size_of(const ScaleView& view) {
  return view.data == nullptr ? 0 : static_cast<uint64_t>(view.capacity * bytes(view.type));
}

}  // namespace

RandomWeights::RandomWeights(const MoeConfig& config, bool has_bias,
                             std::optional<std::vector<int32_t>> experts) {
  if (experts) {
    experts_ = std::move(*experts);
  } else {
    experts_.resize(static_cast<size_t>(config.local_experts));
    std::iota(experts_.begin(), experts_.end(), 0);
  }
  const Storage storage = storage_of(moe_mode_info(config.mode).weights);
  add_weight(storage, &MoeWeights::w1, {fc1_rows(config), config.hidden, 1});
  add_weight(storage, &MoeWeights::w2, {config.hidden, config.inter, 2});
  add_global_factors(config);
  if (!has_bias) return;
  weights_.bias1 = add_bias(fc1_rows(config), 3);
  weights_.bias2 = add_bias(config.hidden, 4);
}

RandomWeights::RandomWeights(MoeMode mode, int64_t rows, int64_t cols, std::vector<int32_t> experts)
    : experts_(std::move(experts)) {
  add_weight(storage_of(moe_mode_info(mode).weights), &MoeWeights::w1, {rows, cols, 1});
}

RandomWeights::RandomWeights(RowFormat format, int64_t cols, std::vector<int32_t> rows)
    : experts_(std::move(rows)) {
  add_weight(storage_of(format), &MoeWeights::w1, {1, cols, 9});
}

void RandomWeights::fill() {
  for (const RandomTensor& tensor : tensors_) {
    const uint64_t slice = tensor.size_bytes / experts_.size();
    std::byte* to = add_buffer(tensor.size_bytes);
    tensor.data(weights_) = to;
    for (size_t i = 0; i < experts_.size(); ++i) {
      fill_random_words(to + i * slice, static_cast<uint64_t>(experts_[i]) * slice, slice,
                        tensor.words);
    }
  }
}

double RandomWeights::bytes(const MoeConfig& config) {
  const auto elements = static_cast<double>((fc1_rows(config) + config.inter) * config.hidden);
  return elements * config.local_experts * moe_mode_info(config.mode).bits_per_weight / 8;
}

std::byte* RandomWeights::add_buffer(uint64_t size_bytes) {
  // NOLINTNEXTLINE(modernize-make-unique): make_unique would clear the memory.
  buffers_.push_back(std::unique_ptr<std::byte[]>(new std::byte[size_bytes]));
  return buffers_.back().get();
}

float* RandomWeights::add_floats(int64_t count) {
  return reinterpret_cast<float*>(add_buffer(static_cast<uint64_t>(count) * sizeof(float)));
}

void RandomWeights::add_weight(const Storage& storage, WeightView MoeWeights::*member,
                               const Matrix& matrix) {
  const auto experts = static_cast<int64_t>(experts_.size());
  const auto [rows, cols, seed] = matrix;
  WeightView& weight = weights_.*member;
  weight.values =
      TensorView::contiguous(static_cast<std::byte*>(nullptr), storage.dtype,
                             {experts, rows, storage.dtype == DType::kU8 ? cols / 2 : cols});
  const int64_t size_bytes = experts * rows * cols * storage.element_bits / 8;
  tensors_.push_back(
      {member, false, static_cast<uint64_t>(size_bytes), element_words(storage, cols, seed)});
  if (storage.block_cols == 0) return;
  ScaleView& scales = weight.scales;
  scales.type = storage.scale_type;
  scales.batch = experts;
  scales.rows = (rows + storage.block_rows - 1) / storage.block_rows;
  scales.blocks = (cols + storage.block_cols - 1) / storage.block_cols;
  scales.capacity = experts * scale_image_size(scales.layout, scales.rows, scales.blocks);
  const uint64_t scale_seed = seed + 100;
  if (storage.scale_type != ScaleType::kF32) {
    tensors_.push_back({member, true, static_cast<uint64_t>(scales.capacity),
                        scale_words(storage, cols, scale_seed)});
    return;
  }
  const int exponent = scale_exponent(storage.rms, cols);
  scales.data = add_per_expert(scales.rows * scales.blocks, [&](uint64_t index) {
    return static_cast<float>(std::ldexp(0.5 + uniform(scale_seed, index), exponent));
  });
}

// value(index) takes the index in the layer with all its experts.
float* RandomWeights::add_per_expert(int64_t count, const std::function<float(uint64_t)>& value) {
  float* const data = add_floats(static_cast<int64_t>(experts_.size()) * count);
  for_each_index(static_cast<int64_t>(experts_.size()), [&](int64_t i) {
    const int64_t first = experts_[static_cast<size_t>(i)] * count;
    for (int64_t j = 0; j < count; ++j) {
      data[i * count + j] = value(static_cast<uint64_t>(first + j));
    }
  });
  return data;
}

PerExpert RandomWeights::add_factors(float base, uint64_t seed) {
  const float* const data = add_per_expert(1, [&](uint64_t expert) {
    return base * static_cast<float>(0.75 + uniform(seed, expert) / 2);
  });
  return PerExpert(
      TensorView::contiguous(data, DType::kF32, {static_cast<int64_t>(experts_.size())}));
}

// The factor of an expert is the global scale of its weights over the static multiplier of its
// input.
void RandomWeights::add_global_factors(const MoeConfig& config) {
  const MoeModeInfo& mode = moe_mode_info(config.mode);
  const bool has_factor =
      mode.weights == WeightFormat::kFp8Tensor || mode.weights == WeightFormat::kNvfp4;
  if (!has_factor) return;
  float input = 1;
  float inter = 1;
  // Values of size 1 that reach 8.
  if (mode.input == RowFormat::kFp8Static) input = inter = 448.0F / 8;
  if (mode.input == RowFormat::kNvfp4) input = inter = 448.0F * 6 / 8;
  if (input != 1) {
    weights_.input_multiplier = input;
    weights_.inter_multiplier = inter;
  }
  const double rms = storage_of(mode.weights).rms;
  const float scale1 = std::ldexp(1.0F, scale_exponent(rms, config.hidden));
  const float scale2 = std::ldexp(1.0F, scale_exponent(rms, config.inter));
  weights_.up_scale = add_factors(scale1 / input, 5);
  if (activation_info(config.activation.kind).is_gated) {
    weights_.gate_scale = add_factors(scale1 / input, 6);
  }
  weights_.down_scale = add_factors(scale2 / inter, 7);
}

TensorView RandomWeights::add_bias(int64_t rows, uint64_t seed) {
  const float* const data =
      add_per_expert(rows, [&](uint64_t index) { return normal(seed, index) / 8; });
  return TensorView::contiguous(data, DType::kF32, {static_cast<int64_t>(experts_.size()), rows});
}

void Transfer::add(TensorView& view) { add(view.data, size_of(view), &view.device); }
void Transfer::add(ScaleView& view) { add(view.data, size_of(view), &view.device); }

void Transfer::add(const RandomTensor& tensor, MoeWeights& weights) {
  made_.push_back(
      {&tensor.data(weights), tensor.size_bytes, &tensor.device(weights), &tensor.words});
}

void Transfer::send() {
  uint64_t total = 0;
  for (const Copy& copy : copies_) total += aligned(copy.size_bytes);
  for (const Made& made : made_) total += aligned(made.size_bytes);
  for (const Buffer& buffer : buffers_) total += aligned(buffer.size_bytes);
  std::byte* to = machine_.reserve(std::max(total, kBufferAlignment));
  for (const Copy& copy : copies_) {
    machine_.write(to, static_cast<const std::byte*>(*copy.data), copy.size_bytes);
    *copy.data = to;
    *copy.device = machine_.device();
    to += aligned(copy.size_bytes);
  }
  for (const Made& made : made_) {
    machine_.fill_words(to, *made.words, made.size_bytes);
    *made.data = to;
    *made.device = machine_.device();
    to += aligned(made.size_bytes);
  }
  for (const Buffer& buffer : buffers_) {
    *buffer.data = to;
    to += aligned(buffer.size_bytes);
  }
}

std::vector<float> random_normal(size_t count, uint64_t seed) {
  constexpr size_t kChunk = 1U << 16U;
  std::vector<float> values(count);
  for_each_index(static_cast<int64_t>((count + kChunk - 1) / kChunk), [&](int64_t chunk) {
    const size_t begin = static_cast<size_t>(chunk) * kChunk;
    for (size_t i = begin; i < std::min(begin + kChunk, count); ++i) values[i] = normal(seed, i);
  });
  return values;
}

std::vector<float> random_logits(int64_t tokens, int64_t experts, double exponent, uint64_t seed) {
  std::vector<float> logits(static_cast<size_t>(tokens * experts));
  for (size_t i = 0; i < logits.size(); ++i) {
    const double gumbel = -std::log(-std::log(uniform(seed, i)));
    const auto rank = static_cast<double>(i % static_cast<size_t>(experts)) + 1;
    logits[i] = static_cast<float>(gumbel - exponent * std::log(rank));
  }
  return logits;
}

}  // namespace narrowfloat::cli
