// See moe_case.h. Magnitudes are chosen so that the rows of both GEMMs are of order 1.
#include "support/moe_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>

#include "formats/float16.h"
#include "formats/minifloat.h"
#include "tensor/element_io.h"

namespace narrowfloat::testing {
namespace {

struct ScaleShape {
  ScaleType type;
  int64_t block_rows;
  int64_t block_cols;
};

std::optional<ScaleShape> scale_shape(WeightFormat format) {
  switch (format) {
    case WeightFormat::kFp8Block:
      return ScaleShape{ScaleType::kF32, 128, 128};
    case WeightFormat::kMxfp8:
    case WeightFormat::kMxfp4:
      return ScaleShape{ScaleType::kUE8M0, 1, 32};
    case WeightFormat::kNvfp4:
      return ScaleShape{ScaleType::kE4M3, 1, 16};
    default:
      return std::nullopt;
  }
}

// Root mean square of the codes themselves.
double code_rms(WeightFormat format) {
  return format == WeightFormat::kMxfp4 || format == WeightFormat::kNvfp4 ? 2.9 : 1.0;
}

// Elements of which larger tensors are repetitions: a prime number, so that rows differ.
constexpr size_t kDistinct = 4'194'301;

// Draws the first elements, copies the others.
template <typename T, typename Draw>
void fill_repeated(std::span<T> values, const Draw& draw) {
  for (T& value : values.first(std::min(values.size(), kDistinct))) value = draw();
  for (size_t i = kDistinct; i < values.size(); i += kDistinct) {
    std::copy_n(values.begin(), std::min(kDistinct, values.size() - i), &values[i]);
  }
}

bool has_factor(WeightFormat format) {
  return format == WeightFormat::kFp8Tensor || format == WeightFormat::kNvfp4;
}

}  // namespace

MoeCase::MoeCase(MoeMode mode, const MoeShape& shape, const Activation& activation, uint64_t seed)
    : shape_(shape), seed_(seed) {
  Random random(seed);
  config_.hidden = shape.hidden;
  config_.inter = shape.inter;
  config_.routing.experts = shape.experts;
  config_.routing.top_k = shape.top_k;
  config_.routing.shared_experts = shape.shared_experts;
  config_.local_experts = shape.experts;
  config_.mode = mode;
  config_.activation = activation;
  const WeightFormat format = moe_mode_info(mode).weights;
  const int64_t fc1 = activation_info(activation.kind).is_gated ? 2 * shape.inter : shape.inter;
  fill_weight(weights_.w1, fc1, shape.hidden, random);
  fill_weight(weights_.w2, shape.hidden, shape.inter, random);
  if (mode == MoeMode::kFp8Tensor || mode == MoeMode::kNvfp4) {
    // Input and intermediate are of order 1 with tails; 8 and 64 leave room.
    const float range = mode == MoeMode::kNvfp4 ? 2688.0F : 448.0F;
    weights_.input_multiplier = range / 8;
    weights_.inter_multiplier = factors(range / 64, random);
  }
  if (has_factor(format)) {
    const float input = weights_.input_multiplier ? 1 / weights_.input_multiplier->value : 1.0F;
    const float inter =
        weights_.input_multiplier ? 64.0F / (mode == MoeMode::kNvfp4 ? 2688 : 448) : 1.0F;
    const auto fan = [&](int64_t cols) {
      return static_cast<float>(1 / (code_rms(format) * std::sqrt(static_cast<double>(cols))));
    };
    weights_.up_scale = factors(fan(shape.hidden) * input, random);
    if (activation_info(activation.kind).is_gated) {
      weights_.gate_scale = factors(fan(shape.hidden) * input, random);
    }
    weights_.down_scale = factors(fan(shape.inter) * inter, random);
  }
  x_.resize(static_cast<size_t>(shape.tokens * shape.hidden));
  fill_repeated(std::span(x_), [&] { return float_to_bf16(random.normal()); });
  inputs_.values = TensorView::contiguous(x_.data(), DType::kBF16, {shape.tokens, shape.hidden});
  logits_.resize(static_cast<size_t>(shape.tokens * shape.experts));
  for (float& logit : logits_) logit = 2 * random.normal();
  routing_.logits =
      TensorView::contiguous(logits_.data(), DType::kF32, {shape.tokens, shape.experts});
}

float* MoeCase::floats(int64_t count) {
  storage_.emplace_back(static_cast<size_t>(count) * sizeof(float));
  return reinterpret_cast<float*>(storage_.back().data());
}

// A different factor for every expert.
PerExpert MoeCase::factors(float base, Random& random) {
  const int64_t count = shape_.experts + shape_.shared_experts;
  float* values = floats(count);
  for (int64_t i = 0; i < count; ++i) {
    values[i] = base * (0.75F + 0.5F * static_cast<float>(random.range(0, 1023)) / 1024.0F);
  }
  return PerExpert(TensorView::contiguous(values, DType::kF32, {count}));
}

void MoeCase::fill_weight(WeightView& view, int64_t rows, int64_t cols, Random& random) {
  const WeightFormat format = moe_mode_info(config_.mode).weights;
  const int64_t experts = shape_.experts + shape_.shared_experts;
  const int64_t count = experts * rows * cols;
  const float fan = 1 / std::sqrt(static_cast<float>(cols));
  if (format == WeightFormat::kBf16) {
    storage_.emplace_back(static_cast<size_t>(count) * 2);
    auto* values = reinterpret_cast<uint16_t*>(storage_.back().data());
    fill_repeated(std::span(values, static_cast<size_t>(count)),
                  [&] { return float_to_bf16(fan * random.normal()); });
    view.values = TensorView::contiguous(values, DType::kBF16, {experts, rows, cols});
  } else if (format == WeightFormat::kMxfp4 || format == WeightFormat::kNvfp4) {
    storage_.emplace_back(static_cast<size_t>(count / 2));
    fill_repeated(std::span(storage_.back()),
                  [&] { return static_cast<uint8_t>(random.bits32()); });
    view.values =
        TensorView::contiguous(storage_.back().data(), DType::kU8, {experts, rows, cols / 2});
  } else {
    storage_.emplace_back(static_cast<size_t>(count));
    fill_repeated(std::span(storage_.back()), [&] { return E4M3::encode(random.normal()); });
    view.values =
        TensorView::contiguous(storage_.back().data(), DType::kF8E4M3, {experts, rows, cols});
  }
  fill_scales(view, rows, cols, random);
}

void MoeCase::fill_scales(WeightView& view, int64_t rows, int64_t cols, Random& random) {
  const WeightFormat format = moe_mode_info(config_.mode).weights;
  const std::optional<ScaleShape> blocks = scale_shape(format);
  if (!blocks) return;
  const int64_t experts = shape_.experts + shape_.shared_experts;
  ScaleView& scales = view.scales;
  scales.type = blocks->type;
  scales.batch = experts;
  scales.rows = (rows + blocks->block_rows - 1) / blocks->block_rows;
  scales.blocks = (cols + blocks->block_cols - 1) / blocks->block_cols;
  scales.capacity = experts * scales.rows * scales.blocks;
  storage_.emplace_back(static_cast<size_t>(scales.capacity * bytes(blocks->type)));
  scales.data = storage_.back().data();
  const double fan = 1 / (code_rms(format) * std::sqrt(static_cast<double>(cols)));
  const int exponent = static_cast<int>(std::lround(std::log2(fan)));
  for (int64_t i = 0; i < scales.capacity; ++i) {
    const float spread = 0.5F + static_cast<float>(random.range(0, 255)) / 256.0F;
    if (blocks->type == ScaleType::kF32) {
      static_cast<float*>(scales.data)[i] = static_cast<float>(fan) * spread;
    } else if (blocks->type == ScaleType::kUE8M0) {
      static_cast<uint8_t*>(scales.data)[i] =
          static_cast<uint8_t>(127 + exponent + random.range(-1, 1));
    } else {
      static_cast<uint8_t*>(scales.data)[i] = E4M3::encode(spread);
    }
  }
}

void MoeCase::add_router_bias() {
  Random random(seed_ + 1);
  float* bias = floats(shape_.experts);
  for (int32_t i = 0; i < shape_.experts; ++i) bias[i] = 0.25F * random.normal();
  routing_.bias = TensorView::contiguous(bias, DType::kF32, {shape_.experts});
}

void MoeCase::add_biases() {
  Random random(seed_ + 2);
  const int64_t experts = shape_.experts + shape_.shared_experts;
  const auto fill = [&](int64_t rows) {
    float* bias = floats(experts * rows);
    for (int64_t i = 0; i < experts * rows; ++i) bias[i] = 0.5F * random.normal();
    return TensorView::contiguous(bias, DType::kF32, {experts, rows});
  };
  weights_.bias1 = fill(weights_.w1.values.shape[1]);
  weights_.bias2 = fill(shape_.hidden);
}

void MoeCase::add_per_expert_parameters() {
  Random random(seed_ + 3);
  const ActivationInfo& info = activation_info(config_.activation.kind);
  if (info.has_alpha) config_.activation.alpha = factors(1.7F, random);
  if (info.has_beta) config_.activation.beta = factors(1.0F, random);
  if (info.has_limits) {
    config_.activation.limit_gate = factors(1.5F, random);
    config_.activation.limit_up = config_.activation.kind == ActivationKind::kSwigluStep
                                      ? config_.activation.limit_gate
                                      : factors(1.25F, random);
  }
}

MoeWeights expert_range(const MoeWeights& weights, int32_t offset, int32_t count) {
  MoeWeights result = weights;
  const auto cut_tensor = [&](TensorView& view) {
    if (view.is_absent()) return;
    const int64_t each = view.num_elements() / view.shape[0];
    view.data = element_pointer(view.data, view.dtype, offset * each);
    view.shape[0] = count;
  };
  const auto cut = [&](WeightView& view) {
    cut_tensor(view.values);
    if (view.scales.data == nullptr) return;
    const int64_t scales_per_expert = view.scales.capacity / view.scales.batch;
    view.scales.data = static_cast<uint8_t*>(view.scales.data) +
                       offset * scales_per_expert * bytes(view.scales.type);
    view.scales.batch = count;
    view.scales.capacity = count * scales_per_expert;
  };
  cut(result.w1);
  cut(result.w2);
  cut_tensor(result.up_scale.values);
  cut_tensor(result.gate_scale.values);
  cut_tensor(result.down_scale.values);
  cut_tensor(result.inter_multiplier.values);
  cut_tensor(result.bias1);
  cut_tensor(result.bias2);
  return result;
}

MoeResult MoeCase::run(const MoeLayer& layer, const MoeRunStyle& style) const {
  const int64_t tokens = inputs_.values.shape[0];
  const MoeConfig& config = layer.config();
  const int64_t slots = config.routing.top_k + config.routing.shared_experts;
  const int64_t rows = layer.max_rows(tokens);
  const BufferStyle buffer{.poison = style.poison, .guard = style.guard};
  const int64_t slot_bytes = bits(config.slot_dtype) / 8;
  const GuardedBuffer out(tokens * config.hidden * bits(config.out_dtype) / 8, buffer);
  const GuardedBuffer slot_out(rows * config.hidden * slot_bytes, buffer);
  const GuardedBuffer weights(tokens * slots * 4, buffer);
  const GuardedBuffer ids(tokens * slots * 4, buffer);
  const GuardedBuffer slot_to_row(tokens * slots * 4, buffer);
  const GuardedBuffer workspace(layer.required_workspace(tokens) + 256, buffer);
  MoeOutputs outputs;
  outputs.out = TensorView::contiguous(out.data(), config.out_dtype, {tokens, config.hidden});
  outputs.slot_out =
      TensorView::contiguous(slot_out.data(), config.slot_dtype, {rows, config.hidden});
  outputs.expert_weights = TensorView::contiguous(weights.data(), DType::kF32, {tokens, slots});
  outputs.topk_ids = TensorView::contiguous(ids.data(), DType::kI32, {tokens, slots});
  outputs.slot_to_row = TensorView::contiguous(slot_to_row.data(), DType::kI32, {tokens * slots});
  auto* aligned =
      reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(workspace.data()) + 255) / 256 * 256);
  layer.run(inputs_, routing_, outputs,
            TensorView::contiguous(aligned, DType::kU8, {layer.required_workspace(tokens)}));
  EXPECT_TRUE(out.intact() && slot_out.intact() && weights.intact() && ids.intact() &&
              slot_to_row.intact() && workspace.intact());
  MoeResult result{out.copy(), {}, weights.copy(), ids.copy(), slot_to_row.copy()};
  const auto row_bytes = static_cast<size_t>(config.hidden * slot_bytes);
  result.slot_rows.resize(static_cast<size_t>(tokens * slots) * row_bytes);
  for (int64_t slot = 0; slot < tokens * slots; ++slot) {
    const int32_t row = slot_to_row.span<int32_t>()[static_cast<size_t>(slot)];
    if (row < 0) continue;
    std::memcpy(result.slot_rows.data() + static_cast<size_t>(slot) * row_bytes,
                slot_out.data() + static_cast<size_t>(row) * row_bytes, row_bytes);
  }
  return result;
}

Distance distance(const std::vector<float>& a, const std::vector<float>& reference, int64_t cols) {
  Distance result;
  double all_error = 0;
  double all = 0;
  const auto width = static_cast<size_t>(cols);
  for (size_t row = 0; row + width <= reference.size(); row += width) {
    double error = 0;
    double norm = 0;
    for (size_t i = row; i < row + width; ++i) {
      const double difference = static_cast<double>(a[i]) - static_cast<double>(reference[i]);
      error += difference * difference;
      norm += static_cast<double>(reference[i]) * static_cast<double>(reference[i]);
    }
    all_error += error;
    all += norm;
    if (norm > 0) result.row = std::max(result.row, std::sqrt(error / norm));
    if (norm == 0) {
      EXPECT_EQ(error, 0) << "row " << row / width << " must be zero";
    }
  }
  result.rel = all > 0 ? std::sqrt(all_error / all) : 0;
  return result;
}

std::vector<float> as_floats(const std::vector<uint8_t>& bytes, DType dtype) {
  const auto count = static_cast<int64_t>(bytes.size()) * 8 / bits(dtype);
  std::vector<float> result(static_cast<size_t>(count));
  widen(dtype, bytes.data(), count, result.data());
  return result;
}

std::string force_moe(std::string_view implementation) {
  std::string text;
  for (const std::string_view op : {"route", "permute", "grouped_gemm", "activation", "combine"}) {
    if (!text.empty()) text += ',';
    text += std::string(op) + ':' + std::string(implementation);
  }
  return text;
}

}  // namespace narrowfloat::testing
