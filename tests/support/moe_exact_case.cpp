// See moe_exact_case.h. Elements of a row are integers that all formats have (0, 1, 2, 3, 4, 6 and
// their negatives), and each row of w1 picks one of them; so u is one of them too.
#include "support/moe_exact_case.h"

#include <cstring>

#include "formats/float16.h"
#include "formats/minifloat.h"

namespace narrowfloat::testing {
namespace {

// The value that element `index` of an activation row must have for its block to have the scale 1;
// 0 where it is free. A token's scale is fixed by 2688 in a block of its own.
float planted(MoeMode mode, RowFormat format, int64_t index) {
  if (has_int8_rows(mode)) return index % 32 == 0 ? 127.0F : 0.0F;
  switch (format) {
    case RowFormat::kFp8Group:
      return index % 128 == 0 ? 448.0F : 0.0F;
    case RowFormat::kMxfp8:
      return index % 32 == 0 ? 448.0F : 0.0F;
    case RowFormat::kNvfp4:
      return index % 16 == 0 ? 6.0F : 0.0F;
    case RowFormat::kNvfp4PerToken:
      if (index == 0) return 2688.0F;
      return index % 16 == 0 ? 6.0F : 0.0F;
    case RowFormat::kFp8Token:
      return index == 0 ? 448.0F : 0.0F;
    default:
      return 0.0F;
  }
}

// Neither planted nor beside 2688, whose block has codes for multiples of 448 only.
bool is_free(MoeMode mode, RowFormat format, int64_t index) {
  const bool is_crowded = format == RowFormat::kNvfp4PerToken && index < 16;
  return !is_crowded && planted(mode, format, index) == 0.0F;
}

void set_weight(const WeightView& weight, int64_t index, float value) {
  auto* bytes = static_cast<uint8_t*>(weight.values.data);
  if (weight.values.dtype == DType::kBF16) {
    static_cast<uint16_t*>(weight.values.data)[index] = float_to_bf16(value);
  } else if (weight.values.dtype == DType::kF8E4M3) {
    bytes[index] = E4M3::encode(value);
  } else {
    const int shift = index % 2 == 0 ? 0 : 4;
    const int other = bytes[index / 2] & (0xF0 >> shift);
    bytes[index / 2] = static_cast<uint8_t>(other | E2M1::encode(value) << shift);
  }
}

void set_scales_to_one(const ScaleView& scales) {
  for (int64_t i = 0; i < scales.capacity && scales.data != nullptr; ++i) {
    if (scales.type == ScaleType::kF32) {
      static_cast<float*>(scales.data)[i] = 1.0F;
    } else {
      const uint8_t one = scales.type == ScaleType::kUE8M0 ? 127 : E4M3::encode(1.0F);
      static_cast<uint8_t*>(scales.data)[i] = one;
    }
  }
}

}  // namespace

ExactMoe::ExactMoe(MoeMode mode, const MoeShape& shape, uint64_t seed)
    : mode_(mode),
      case_(
          std::make_unique<MoeCase>(mode, shape, Activation::plain(ActivationKind::kRelu), seed)) {
  Random random(seed + 17);
  case_->config().slot_dtype = DType::kF32;
  case_->config().out_dtype = DType::kF32;
  MoeWeights& weights = case_->weights();
  weights.up_scale = 1.0F;
  weights.gate_scale = 1.0F;
  weights.down_scale = 1.0F;
  weights.inter_multiplier = 1.0F;
  if (weights.input_multiplier) weights.input_multiplier = 1.0F;
  fill_weights(random);
  fill_inputs(random);
  fill_routing(random);
}

void ExactMoe::fill_weights(Random& random) {
  const MoeShape& shape = case_->shape();
  const MoeModeInfo& mode = moe_mode_info(mode_);
  MoeWeights& weights = case_->weights();
  const int64_t experts = shape.experts + shape.shared_experts;
  set_scales_to_one(weights.w1.scales);
  set_scales_to_one(weights.w2.scales);
  for (int64_t row = 0; row < experts * shape.inter; ++row) {
    const int64_t i = row % shape.inter;
    int64_t picked = random.range(0, shape.hidden - 1);
    while (!is_free(mode_, mode.input, picked)) picked = random.range(0, shape.hidden - 1);
    const float sign = random.chance(50) ? 1.0F : -1.0F;
    for (int64_t col = 0; col < shape.hidden; ++col) {
      const bool is_set = col == picked && is_free(mode_, mode.intermediate, i);
      set_weight(weights.w1, row * shape.hidden + col, is_set ? sign : 0.0F);
    }
    bias1_.push_back(planted(mode_, mode.intermediate, i));
  }
  for (int64_t i = 0; i < experts * shape.hidden * shape.inter; ++i) {
    set_weight(weights.w2, i, static_cast<float>(random.range(-1, 1)));
  }
  for (int64_t i = 0; i < experts * shape.hidden; ++i) {
    bias2_.push_back(static_cast<float>(random.range(-8, 8)));
  }
  weights.bias1 = TensorView::contiguous(bias1_.data(), DType::kF32, {experts, shape.inter});
  weights.bias2 = TensorView::contiguous(bias2_.data(), DType::kF32, {experts, shape.hidden});
}

void ExactMoe::fill_inputs(Random& random) {
  const RowFormat format = moe_mode_info(mode_).input;
  for (size_t i = 0; i < case_->x().size(); ++i) {
    const auto col = static_cast<int64_t>(i) % case_->shape().hidden;
    const float sign = random.chance(50) ? 1.0F : -1.0F;
    const float free = is_free(mode_, format, col)
                           ? sign * random.pick({0.0F, 1.0F, 2.0F, 3.0F, 4.0F, 6.0F})
                           : 0.0F;
    const float fixed = planted(mode_, format, col);
    case_->x()[i] = float_to_bf16(fixed != 0.0F ? fixed : free);
  }
}

void ExactMoe::fill_routing(Random& random) {
  const MoeShape& shape = case_->shape();
  for (int64_t i = 0; i < shape.tokens * shape.top_k; ++i) {
    ids_.push_back(static_cast<int32_t>(random.range(0, shape.experts - 1)));
    slot_weights_.push_back(random.chance(50) ? 0.5F : 1.0F);
  }
  case_->routing() = {};
  case_->routing().ids =
      TensorView::contiguous(ids_.data(), DType::kI32, {shape.tokens, shape.top_k});
  case_->routing().weights =
      TensorView::contiguous(slot_weights_.data(), DType::kF32, {shape.tokens, shape.top_k});
}

}  // namespace narrowfloat::testing
