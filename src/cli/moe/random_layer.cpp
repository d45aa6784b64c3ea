// Numbers come from a hash of their position (splitmix64), so threads can fill a buffer in any
// order. Codes cover four octaves, FP4 all codes; scales two octaves.
#include "cli/moe/random_layer.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cli/threads.h"

namespace narrowfloat::cli {
namespace {

constexpr size_t kWordBytes = sizeof(uint64_t);
constexpr int64_t kPieceBytes = 1 << 22;  // Filled by one thread at a time.

// Root mean squares of the codes as fill_words() draws them.
constexpr double kFp4Rms = 2.926;       // All sixteen codes alike.
constexpr double kFp8Rms = 13.5;        // 2 to 30, uniform in the code.
constexpr double kBf16Rms = 7.05;       // Times 2^exponent of the lowest octave.
constexpr double kE4m3ScaleRms = 2.32;  // Block scales 1 to 3.75, uniform in the code.

uint64_t hash(uint64_t seed, uint64_t index) {
  uint64_t x = seed * 0xD1342543DE82EF95ULL + (index + 1) * 0x9E3779B97F4A7C15ULL;
  x = (x ^ x >> 30U) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ x >> 27U) * 0x94D049BB133111EBULL;
  return x ^ x >> 31U;
}

// In (0, 1).
double uniform(uint64_t seed, uint64_t index) {
  return (static_cast<double>(hash(seed, index) >> 11U) + 0.5) * 0x1p-53;
}

// Random bits where `mask` has ones, plus `base`, in every element at once: no sum may carry into
// the next element.
struct WordPattern {
  uint64_t mask = ~uint64_t{0};
  uint64_t base = 0;
};

void fill_words(std::byte* data, int64_t size_bytes, const WordPattern& pattern, uint64_t seed) {
  const int64_t pieces = (size_bytes + kPieceBytes - 1) / kPieceBytes;
  for_each_index(pieces, [&](int64_t piece) {
    const auto begin = static_cast<size_t>(piece * kPieceBytes);
    const auto end = static_cast<size_t>(std::min((piece + 1) * kPieceBytes, size_bytes));
    for (size_t at = begin; at < end; at += kWordBytes) {
      const uint64_t word = (hash(seed, at / kWordBytes) & pattern.mask) + pattern.base;
      std::memcpy(data + at, &word, std::min(kWordBytes, end - at));
    }
  });
}

// The same 8 or 16 bits in every element of a word.
uint64_t repeated8(uint64_t bits) { return bits * 0x0101010101010101ULL; }
uint64_t repeated16(uint64_t bits) { return bits * 0x0001000100010001ULL; }

// Exponent of the power of two nearest to 1 / (rms * sqrt(cols)).
int scale_exponent(double rms, int64_t cols) {
  return static_cast<int>(std::lround(-std::log2(rms * std::sqrt(static_cast<double>(cols)))));
}

// What is the same for all weights of a format: how its elements and its block scales lie in
// memory.
struct Storage {
  DType dtype;
  int element_bits;
  int64_t block_rows, block_cols;  // 0: no block scales.
  ScaleType scale_type;
  double rms;
};
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

WordPattern element_pattern(const Storage& storage, int64_t cols) {
  if (storage.element_bits == 4) return {};
  // Sign, two bits of exponent and the mantissa are random; FP8 starts at 2.
  if (storage.element_bits == 8) return {repeated8(0x9F), repeated8(0x40)};
  const int exponent = 127 + scale_exponent(storage.rms, cols);
  return {repeated16(0x81FF), repeated16(static_cast<uint64_t>(exponent) << 7U)};
}

void fill_scales(const ScaleView& scales, const Storage& storage, int64_t cols, uint64_t seed) {
  const int exponent = scale_exponent(storage.rms, cols);
  auto* data = static_cast<std::byte*>(scales.data);
  if (scales.type == ScaleType::kE4M3) {
    return fill_words(data, scales.capacity, {repeated8(0x0F), repeated8(0x38)}, seed);
  }
  if (scales.type == ScaleType::kUE8M0) {
    const int lowest = 127 + exponent - 1;
    const uint64_t base = repeated8(static_cast<uint64_t>(lowest));
    return fill_words(data, scales.capacity, {repeated8(0x01), base}, seed);
  }
  for (int64_t i = 0; i < scales.capacity; ++i) {
    const double factor = 0.5 + uniform(seed, static_cast<uint64_t>(i));
    const auto scale = static_cast<float>(std::ldexp(factor, exponent));
    std::memcpy(data + static_cast<size_t>(i) * sizeof(scale), &scale, sizeof(scale));
  }
}

int64_t fc1_rows(const MoeConfig& config) {
  return activation_info(config.activation.kind).is_gated ? 2 * config.inter : config.inter;
}

}  // namespace

RandomWeights::RandomWeights(const MoeConfig& config, bool has_bias) {
  weights_.w1 = add_weight(config, fc1_rows(config), config.hidden, 1);
  weights_.w2 = add_weight(config, config.hidden, config.inter, 2);
  add_global_factors(config);
  if (!has_bias) return;
  weights_.bias1 = add_bias(config, fc1_rows(config), 3);
  weights_.bias2 = add_bias(config, config.hidden, 4);
}

double RandomWeights::bytes(const MoeConfig& config) {
  const auto elements = static_cast<double>((fc1_rows(config) + config.inter) * config.hidden);
  return elements * config.local_experts * moe_mode_info(config.mode).bits_per_weight / 8;
}

std::byte* RandomWeights::add_buffer(int64_t size_bytes) {
  const auto size = static_cast<size_t>(size_bytes);
  // NOLINTNEXTLINE(modernize-make-unique): make_unique would clear the memory.
  buffers_.push_back({std::unique_ptr<std::byte[]>(new std::byte[size]), size});
  return buffers_.back().data.get();
}

WeightView RandomWeights::add_weight(const MoeConfig& config, int64_t rows, int64_t cols,
                                     uint64_t seed) {
  const Storage storage = storage_of(moe_mode_info(config.mode).weights);
  const int64_t experts = config.local_experts;
  const int64_t stored_cols = storage.dtype == DType::kU8 ? cols / 2 : cols;
  const int64_t size_bytes = experts * rows * cols * storage.element_bits / 8;
  std::byte* values = add_buffer(size_bytes);
  fill_words(values, size_bytes, element_pattern(storage, cols), seed);
  WeightView weight;
  weight.values = TensorView::contiguous(values, storage.dtype, {experts, rows, stored_cols});
  if (storage.block_cols == 0) return weight;
  ScaleView& scales = weight.scales;
  scales.type = storage.scale_type;
  scales.batch = experts;
  scales.rows = (rows + storage.block_rows - 1) / storage.block_rows;
  scales.blocks = (cols + storage.block_cols - 1) / storage.block_cols;
  scales.capacity = experts * scale_image_size(scales.layout, scales.rows, scales.blocks);
  scales.data = add_buffer(scales.capacity * narrowfloat::bytes(storage.scale_type));
  fill_scales(scales, storage, cols, seed + 100);
  return weight;
}

PerExpert RandomWeights::add_factors(const MoeConfig& config, float base, uint64_t seed) {
  const int64_t experts = config.local_experts;
  auto* data = reinterpret_cast<float*>(add_buffer(experts * int64_t{sizeof(float)}));
  for (int64_t e = 0; e < experts; ++e) {
    data[e] = base * static_cast<float>(0.75 + uniform(seed, static_cast<uint64_t>(e)) / 2);
  }
  return PerExpert(TensorView::contiguous(data, DType::kF32, {experts}));
}

// Factors of an expert: the global scale of its weights, over the static multiplier of what comes
// in.
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
  weights_.up_scale = add_factors(config, scale1 / input, 5);
  if (activation_info(config.activation.kind).is_gated) {
    weights_.gate_scale = add_factors(config, scale1 / input, 6);
  }
  weights_.down_scale = add_factors(config, scale2 / inter, 7);
}

TensorView RandomWeights::add_bias(const MoeConfig& config, int64_t rows, uint64_t seed) {
  const int64_t count = config.local_experts * rows;
  auto* data = reinterpret_cast<float*>(add_buffer(count * int64_t{sizeof(float)}));
  const std::vector<float> values = random_normal(static_cast<size_t>(count), seed);
  std::transform(values.begin(), values.end(), data, [](float value) { return value / 8; });
  return TensorView::contiguous(data, DType::kF32, {config.local_experts, rows});
}

std::vector<float> random_normal(size_t count, uint64_t seed) {
  std::vector<float> values(count);
  // A sum of four uniform numbers of 16 bits, scaled to variance 1.
  constexpr double kScale = 1.7320508075688772 / 65536;
  for (size_t i = 0; i < count; ++i) {
    const uint64_t bits = hash(seed, i);
    const uint64_t sum =
        (bits & 0xFFFFU) + (bits >> 16U & 0xFFFFU) + (bits >> 32U & 0xFFFFU) + (bits >> 48U);
    values[i] = static_cast<float>((static_cast<double>(sum) - 2 * 65535.0) * kScale);
  }
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
