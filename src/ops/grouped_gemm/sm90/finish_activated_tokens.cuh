// As finish_activated.cuh, for sums whose threads have four neighbouring columns of a token
// (token_loop.cuh). A warpgroup's two blocks are u and g of the same 64 columns, and a thread has
// both: 16 columns of h for each of two or four tokens, the other 48 in three more lanes.
#pragma once

#include "ops/grouped_gemm/sm90/finish_activated.cuh"
#include "ops/grouped_gemm/sm90/finish_tokens.cuh"

namespace narrowfloat {

// Of rows `row` to `row` + 3 of a block.
struct FourBiases {
  float of[4] = {-0.0F, -0.0F, -0.0F, -0.0F};

  __device__ FourBiases(const GemmParams& params, const ColumnFactors& columns, int block,
                        int row) {
    if (params.epilogue.bias == nullptr) return;
    const OutputColumns four(columns, params.image_rows, block, row);
    if (four.first >= params.rows) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) of[i] = four.factors[i].bias;
  }
};

// Of one work item, by the threads of a consumer warpgroup. kTokenBlocks: of 64 tokens.
template <class Shape, int kTokenBlocks>
class TokenFinisher {
 public:
  using Sums = float[kTokenBlocks][64];

  __device__ TokenFinisher(const GemmParams& params, GemmStorage<Shape>& shared,
                           const WorkItem& item)
      : params_(params),
        shared_(shared),
        item_(item),
        consumer_(consumer_thread()),
        warpgroup_(consumer_ / kWarpgroup),
        thread_(consumer_ % kWarpgroup) {}

  __device__ void finish(Sums& sums) const {
    // The factors of tokens are there, and later no longer needed.
    sync_threads(1 + warpgroup_, kWarpgroup);
    if (!params_.activation.is_there) {
      finish_token_blocks(params_,
                          {.first_row = item_.first_row,
                           .num_rows = item_.num_rows,
                           .first_block = first_block(),
                           .shared_tokens = shared_.factors[warpgroup_],
                           .shared_columns = shared_.columns[warpgroup_]},
                          sums);
    } else if constexpr (Shape::writes(RowFormat::kFp8Group)) {
      params_.activation.format == RowFormat::kFp8Static ? store_static(sums) : store_groups(sums);
    }
    sync_threads(1 + warpgroup_, kWarpgroup);
  }

 private:
  static constexpr int kTokens = 2 * kTokenBlocks;  // Of a thread.

  [[nodiscard]] __device__ int first_block() const { return item_.block + 2 * warpgroup_; }
  [[nodiscard]] __device__ int token(int i) const {
    return i / 2 * 64 + i % 2 * 8 + thread_ / 32 * 16 + thread_ % 32 / 4;
  }
  [[nodiscard]] __device__ int col(int group) const {
    return first_block() / 2 * kUnitRows + group * 16 + thread_ % 4 * 4;
  }
  [[nodiscard]] __device__ uint8_t* values(int i) const {
    return params_.activation.values + (item_.first_row + token(i)) * params_.activation.row_bytes;
  }

  // Calls sink(i, group, h) for columns col(group) to col(group) + 3 of token(i).
  template <class Sink>
  __device__ void activate(const Sums& sums, Sink&& sink) const {
    const FusedActivation& activation = params_.activation;
    const SwigluParameters parameters(activation, item_.expert);
    const ColumnFactors columns(params_, item_.expert);
#pragma unroll
    for (int group = 0; group < 4; ++group) {
      const int row = group * 16 + thread_ % 4 * 4;
      const FourBiases up(params_, columns, first_block(), row);
      const FourBiases gate(params_, columns, first_block() + 1, row);
      const bool is_padding = col(group) >= params_.rows / 2;
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        const TokenFactor factor = shared_.factors[warpgroup_][token(i)];
        const float* own = sums[i / 2] + 8 * group + i % 2 * 2;
        float h[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int at = j / 2 + j % 2 * 4;
          const float u = finished(own[at], factor, {columns.scale(false), up.of[j]});
          const float g = finished(own[32 + at], factor, {columns.scale(true), gate.of[j]});
          h[j] = is_padding ? 0.0F : fast_swiglu(u, g, parameters);
        }
        sink(i, group, float4{h[0], h[1], h[2], h[3]});
      }
    }
  }

  [[nodiscard]] __device__ bool has(int i, int group) const {
    return token(i) < item_.num_rows && col(group) < params_.rows / 2;
  }

  __device__ void store_static(const Sums& sums) const {
    const float multiplier = params_.activation.multiplier.of(item_.expert);
    activate(sums, [&](int i, int group, const float4& h) {
      if (has(i, group)) {
        store(values(i) + col(group), encode_tile_detail::four_e4m3(h, multiplier));
      }
    });
  }

  // The largest magnitudes of a token's columns: here 16, with three more lanes 64, with the other
  // warpgroup's 128. The activation is made twice, which costs less than registers for it.
  __device__ void store_groups(Sums& sums) const {
    float largest[kTokens] = {};
    activate(sums, [&](int i, int /*group*/, const float4& h) {
      largest[i] =
          fmaxf(fmaxf(fmaxf(largest[i], fabsf(h.x)), fabsf(h.y)), fmaxf(fabsf(h.z), fabsf(h.w)));
    });
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      largest[i] = bits_float(group_max<4>(float_bits(largest[i])));
      if (thread_ % 4 == 0) shared_.maxima[warpgroup_ * Shape::kTokens + token(i)] = largest[i];
    }
    sync_consumers();
    float multipliers[kTokens];
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const float other = shared_.maxima[(1 - warpgroup_) * Shape::kTokens + token(i)];
      const auto scale = encode_tile_detail::scale_of_group(fmaxf(largest[i], other));
      multipliers[i] = scale.multiplier;
      const bool stores = thread_ % 4 == 0 && warpgroup_ == 0 && token(i) < item_.num_rows;
      if (stores) store_scale(token(i), scale.stored);
    }
#pragma unroll
    for (int i = 0; i < kTokenBlocks * 64; ++i) keep_apart(sums[i / 64][i % 64]);
    activate(sums, [&](int i, int group, const float4& h) {
      if (has(i, group)) {
        store(values(i) + col(group), encode_tile_detail::four_e4m3(h, multipliers[i]));
      }
    });
    // Before the next item's maxima.
    sync_consumers();
  }

  __device__ void store_scale(int token, float scale) const {
    const FusedActivation& activation = params_.activation;
    static_cast<float*>(activation.scales)[(item_.first_row + token) * activation.scale_row_stride +
                                           item_.block / 4 * activation.scale_block_stride] =
        canonical_nan(scale);
  }

  const GemmParams& params_;
  GemmStorage<Shape>& shared_;
  WorkItem item_;
  int consumer_;
  int warpgroup_;
  int thread_;
};

}  // namespace narrowfloat
