// Rows of a norm as runs of 16 elements, and their sum of squares (spec 6.12).
//
// The sum is the fixed tree of formats/rms_norm.h whatever the shape of the launch. A run is two of
// its leaves. The 32 runs of a warp are one subtree, evaluated by shuffles between lanes 1, 2, 4,
// ... apart (a + b is b + a, so all lanes get its bits). The sums of all warps are stored in shared
// memory in row order and joined in the same way. Runs beyond the row are +0, as the tree's absent
// leaves are.
#pragma once

#include "device/device_math.cuh"
#include "device/elements.cuh"
#include "device/norm_tree.cuh"
#include "device/ptx/prefetch.cuh"
#include "device/reduce.cuh"
#include "formats/rms_norm.h"
#include "ops/quantize/sm90/row_runs.h"
#include "ops/quantize/sm90/row_sources.cuh"

namespace narrowfloat {

// Each of a row's subtrees covers a warp's 32 runs of 16 elements.
inline constexpr int64_t kMaxNormCols = int64_t{kMaxNormSums} * kWarpSize * kRowRun;

// The row (batch, row); flat_row = batch * rows + row.
struct RowPlace {
  uint32_t batch;
  int32_t row;
  int32_t flat_row;
};

__device__ inline const uint8_t* input_row(const QuantizeParams& params, const RowPlace& place) {
  return params.input + place.batch * params.input_batch_stride +
         int64_t{place.row} * params.input_row_stride;
}

template <class HalfType>
struct NormRows {
  using Half = HalfType;
  using Elements = PackedElements<Half, kRowRun>;
  static constexpr bool kMayBeNorm = true;

  __device__ static bool is_norm(const QuantizeParams& /*params*/) { return true; }

  // Loads the operand of the norm: the residual where there is one, to which add_input() belongs.
  __device__ static Elements load(const QuantizeParams& params, const RowPlace& place,
                                  uint32_t col) {
    const size_t offset = size_t{col} * sizeof(uint16_t);
    // Its load must wait until registers are free.
    prefetch_to_l2(params.vector + offset);
    return load_elements<Elements>(row_of_norm(params, place) + offset);
  }

  // Adds the input into the residual, of runs that were loaded already: all loads are issued before
  // the first store.
  template <int kRuns>
  __device__ static void add_input(const QuantizeParams& params, const RowPlace& place,
                                   const uint32_t (&cols)[kRuns], Elements (&runs)[kRuns]) {
    if (params.residual == nullptr) return;
    Elements input[kRuns];
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      if (cols[i] >= params.cols) continue;
      input[i] =
          load_elements<Elements>(input_row(params, place) + size_t{cols[i]} * sizeof(uint16_t));
    }
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      if (cols[i] >= params.cols) continue;
      runs[i] = sum(runs[i], input[i]);
      store_elements(runs[i], residual_row(params, place) + size_t{cols[i]} * sizeof(uint16_t));
    }
  }

  __device__ static Elements finish(const QuantizeParams& params, const Elements& h, uint32_t col,
                                    float reciprocal_rms) {
    const auto weight = load_elements<Elements>(params.vector + size_t{col} * sizeof(uint16_t));
    Elements y;
#pragma unroll
    for (int i = 0; i < Elements::kWords; ++i) {
      y.words[i] = Half::pack(rms_norm_element(h[2 * i], reciprocal_rms, weight[2 * i]),
                              rms_norm_element(h[2 * i + 1], reciprocal_rms, weight[2 * i + 1]));
    }
    return y;
  }

  __device__ static void store(const QuantizeParams& /*params*/, const Elements& y, void* address) {
    store_elements(y, address);
  }

 private:
  __device__ static uint8_t* residual_row(const QuantizeParams& params, const RowPlace& place) {
    return params.residual + int64_t{place.flat_row} * params.residual_row_stride;
  }
  __device__ static const uint8_t* row_of_norm(const QuantizeParams& params,
                                               const RowPlace& place) {
    return params.residual != nullptr ? residual_row(params, place) : input_row(params, place);
  }
  __device__ static Elements sum(const Elements& a, const Elements& b) {
    Elements result;
#pragma unroll
    for (int i = 0; i < Elements::kWords; ++i) {
      result.words[i] = Half::pack(add_rn(a[2 * i], b[2 * i]), add_rn(a[2 * i + 1], b[2 * i + 1]));
    }
    return result;
  }
};

// Joins the two leaves of a run.
template <class Elements>
__device__ inline float sum_of_squares(const Elements& h) {
  static_assert(Elements::kSize == 16);
  float leaves[2] = {0.0F, 0.0F};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    leaves[0] = fma_rn(h[i], h[i], leaves[0]);
    leaves[1] = fma_rn(h[8 + i], h[8 + i], leaves[1]);
  }
  return add_rn(leaves[0], leaves[1]);
}

}  // namespace narrowfloat
