// Applies factors and bias to the sums of a strip's 16 output columns and stores them. Absent
// factors and biases are the neutral elements of their operation, which for an addition is -0.
#pragma once

#include <algorithm>
#include <array>
#include <type_traits>

#include "formats/float16.h"
#include "ops/grouped_gemm/gemm_output.h"
#include "ops/grouped_gemm/row_blocks.h"
#include "ops/grouped_gemm/strip_weights.h"
#include "ops/grouped_gemm/x86/epilogue_kernels.h"

namespace narrowfloat {

inline float slot_weight_of(const GemmCall& call, int64_t row) {
  const GemmEpilogue& epilogue = call.epilogue;
  if (epilogue.slot_weights == nullptr) return 1;
  return epilogue.slot_weights[epilogue.row_to_slot[row]];
}

inline float row_scale_of(const GemmCall& call, int64_t row) {
  if (call.rows.row_scale == nullptr) return 1;
  return call.rows.row_scale[call.rows.source(row)];
}

// The place of a number of an output of fp32 or bf16.
inline void* output_of(const GemmCall& call, int64_t index) {
  if (call.output_dtype == DType::kBF16) return static_cast<uint16_t*>(call.output) + index;
  return static_cast<float*>(call.output) + index;
}

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

  // Stores the strip's 16 outputs of a row.
  void store(int64_t row, const Real* sums) const {
    const Real weight = slot_weight_of(call_, row);
    const Real row_scale = row_scale_of(call_, row);
    Lanes values;
    for (size_t lane = 0; lane < values.size(); ++lane) {
      values[lane] = (scales_[lane] * row_scale) * (weight * sums[lane]) + bias_[lane];
    }
    store_results(call_.output_dtype, values.data(), kStripRows, row * rows_ + first_,
                  call_.output);
  }

  // Stores rows with the kernels. strip: how many strips this one comes after that of the rows'
  // places; sums_of_strip: the distance of sums from one strip to the next.
  void store_rows(const EpilogueKernels& kernels, const EpilogueRow* rows, int64_t count,
                  int64_t strip, int64_t sums_of_strip) const {
    const bool is_bf16 = call_.output_dtype == DType::kBF16;
    (is_bf16 ? kernels.store_bf16 : kernels.store_fp32)({.scales = scales_.data(),
                                                         .bias = bias_.data(),
                                                         .sums = strip * sums_of_strip,
                                                         .outputs = strip * kStripRows},
                                                        rows, count);
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

// Strips of weights, one after the other.
struct Strips {
  int64_t first;
  int64_t count;
};

// The sums of a block's rows with some strips, 16 numbers each: the first ones, and the distances
// from one row and from one strip to the next.
template <typename Real>
struct BlockSums {
  const Real* first;
  int64_t row;
  int64_t strip;
};

template <typename Real, size_t kLanes, size_t kStrips>
BlockSums<Real> side_by_side(const std::array<std::array<Real, kLanes>, kStrips>* rows) {
  return {.first = rows[0][0].data(), .row = kLanes * kStrips, .strip = kLanes};
}

// Applies the epilogue to a block's sums and stores them. kernels: null for portable loops.
template <typename Real>
void store_strips(const GemmShape& shape, const GemmCall& call, const RowBlock& block,
                  Strips strips, const BlockSums<Real>& sums, const EpilogueKernels* kernels) {
  std::array<EpilogueRow, kBlockRows> rows;
  if constexpr (std::is_same_v<Real, float>) {
    for (int64_t i = 0; kernels != nullptr && i < block.count; ++i) {
      const int64_t row = block.rows[static_cast<size_t>(i)];
      rows[static_cast<size_t>(i)] = {
          .sums = sums.first + i * sums.row,
          .weight = slot_weight_of(call, row),
          .row_scale = row_scale_of(call, row),
          .output = output_of(call, row * shape.rows + strips.first * kStripRows)};
    }
  }
  for (int64_t strip = 0; strip < strips.count; ++strip) {
    const StripEpilogue<Real> epilogue(shape, call, block.expert, strips.first + strip);
    if constexpr (std::is_same_v<Real, float>) {
      if (kernels != nullptr) {
        epilogue.store_rows(*kernels, rows.data(), block.count, strip, sums.strip);
        continue;
      }
    }
    for (int64_t i = 0; i < block.count; ++i) {
      epilogue.store(block.rows[static_cast<size_t>(i)],
                     sums.first + i * sums.row + strip * sums.strip);
    }
  }
}

}  // namespace narrowfloat
