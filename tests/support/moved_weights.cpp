// See moved_weights.h.
#include "support/moved_weights.h"

#include <cstring>

namespace narrowfloat::testing {

void* MovedWeights::moved(const void* data, WeightRow extents, int64_t row_bytes,
                          const RowSource& source) {
  const auto* const from = static_cast<const uint8_t*>(data);
  std::vector<uint8_t>& to =
      storage_.emplace_back(static_cast<size_t>(extents.expert * extents.row * row_bytes));
  for (int64_t expert = 0; expert < extents.expert; ++expert) {
    for (int64_t row = 0; row < extents.row; ++row) {
      const WeightRow original = source({expert, row});
      std::memcpy(to.data() + (expert * extents.row + row) * row_bytes,
                  from + (original.expert * extents.row + original.row) * row_bytes,
                  static_cast<size_t>(row_bytes));
    }
  }
  return to.data();
}

void MovedWeights::move(WeightView& weight, TensorView& bias, const RowSource& source) {
  TensorView& values = weight.values;
  const WeightRow extents{values.shape[0], values.shape[1]};
  values.data = moved(values.data, extents, values.shape[2] * bits(values.dtype) / 8, source);
  if (ScaleView& scales = weight.scales; scales.data != nullptr) {
    const int64_t block = scales.rows == extents.row ? 1 : 128;
    scales.data = moved(scales.data, {scales.batch, scales.rows},
                        scales.blocks * bytes(scales.type), [&](WeightRow at) {
                          const WeightRow original = source({at.expert, at.row * block});
                          return WeightRow{original.expert, original.row / block};
                        });
  }
  if (!bias.is_absent()) bias.data = moved(bias.data, extents, bits(bias.dtype) / 8, source);
}

void MovedWeights::reorder_gate(GateOrder to) {
  const int64_t rows = weights_.w1.values.shape[1];
  move_first([&](WeightRow at) {
    const int64_t half = rows / 2;
    int64_t row = at.row;
    if (to == GateOrder::kGateUp) row = at.row < half ? at.row + half : at.row - half;
    if (to == GateOrder::kInterleaved) row = at.row % 2 == 0 ? half + at.row / 2 : at.row / 2;
    return WeightRow{at.expert, row};
  });
}

void MovedWeights::rename_experts(const std::vector<int32_t>& experts, PerExpert& parameter) {
  TensorView& values = parameter.values;
  if (values.is_absent()) return;
  values.data = moved(values.data, {values.shape[0], 1}, sizeof(float), [&](WeightRow at) {
    return WeightRow{experts[static_cast<size_t>(at.expert)], at.row};
  });
}

void MovedWeights::rename_experts(const std::vector<int32_t>& experts) {
  const auto source = [&](WeightRow at) {
    return WeightRow{experts[static_cast<size_t>(at.expert)], at.row};
  };
  move_first(source);
  move_second(source);
  for (PerExpert* factor : {&weights_.up_scale, &weights_.gate_scale, &weights_.down_scale,
                            &weights_.inter_multiplier}) {
    rename_experts(experts, *factor);
  }
}

}  // namespace narrowfloat::testing
