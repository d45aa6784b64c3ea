// Applies factors and bias to the sums of a strip's 16 output columns and stores them. Absent
// factors and biases are the neutral elements of their operation, which for an addition is -0.
#pragma once

#include <array>

#include "formats/float16.h"
#include "ops/grouped_gemm/gemm_output.h"
#include "ops/grouped_gemm/row_blocks.h"
#include "ops/grouped_gemm/strip_weights.h"

namespace narrowfloat {

template <typename Real>
class StripEpilogue {
 public:
  using Lanes = std::array<Real, kStripRows>;

  StripEpilogue(const GemmShape& shape, const GemmCall& call, int64_t expert, int64_t strip)
      : call_(call), rows_(shape.rows), first_(strip * kStripRows) {
    const GemmEpilogue& epilogue = call_.epilogue;
    for (int64_t lane = 0; lane < kStripRows; ++lane) {
      const int64_t n = first_ + lane;
      const bool is_gate = epilogue.gate_order && is_gate_row(*epilogue.gate_order, n, rows_);
      scales_[static_cast<size_t>(lane)] =
          is_gate ? epilogue.gate_scale.of(expert) : epilogue.scale.of(expert);
      bias_[static_cast<size_t>(lane)] = bias(expert * rows_ + n);
    }
  }

  void store(int64_t row, const Lanes& sums) const {
    const GemmEpilogue& epilogue = call_.epilogue;
    Real weight = 1;
    if (epilogue.slot_weights != nullptr) {
      weight = epilogue.slot_weights[epilogue.row_to_slot[row]];
    }
    Real row_scale = 1;
    if (call_.rows.row_scale != nullptr) {
      row_scale = call_.rows.row_scale[call_.rows.source(row)];
    }
    Lanes values;
    for (size_t lane = 0; lane < sums.size(); ++lane) {
      values[lane] = (scales_[lane] * row_scale) * (weight * sums[lane]) + bias_[lane];
    }
    store_results(call_.output_dtype, values.data(), kStripRows, row * rows_ + first_,
                  call_.output);
  }

 private:
  [[nodiscard]] float bias(int64_t index) const {
    const GemmEpilogue& epilogue = call_.epilogue;
    if (epilogue.bias == nullptr) return -0.0F;
    if (epilogue.bias_dtype == DType::kF32) {
      return static_cast<const float*>(epilogue.bias)[index];
    }
    return bf16_to_float(static_cast<const uint16_t*>(epilogue.bias)[index]);
  }

  const GemmCall& call_;
  int64_t rows_;
  int64_t first_;
  Lanes scales_;
  Lanes bias_;
};

// Stores the sums of a block's rows with `strips` strips from first_strip on: sums[i][strip].
template <size_t kStrips>
void store_strips(const GemmShape& shape, const GemmCall& call, const RowBlock& block,
                  int64_t first_strip, int64_t strips,
                  const std::array<StripEpilogue<float>::Lanes, kStrips>* sums) {
  for (int64_t strip = 0; strip < strips; ++strip) {
    const StripEpilogue<float> epilogue(shape, call, block.expert, first_strip + strip);
    for (int64_t i = 0; i < block.count; ++i) {
      epilogue.store(block.rows[static_cast<size_t>(i)], sums[i][static_cast<size_t>(strip)]);
    }
  }
}

}  // namespace narrowfloat
