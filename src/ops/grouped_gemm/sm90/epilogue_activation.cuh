// The epilogue with an activation: from a tile's sums in registers to results, those of the GEMM
// (epilogue.cuh) or, after SwiGLU, rows of the second GEMM, which then never leave the SM.
//
//   u, g   finished sums of the same column and token
//   h      fast_swiglu(u, g), then epilogue_quantize.cuh
//
// n sub-tiles come in pairs of u and g (packed_weights.h). A warpgroup with two of them has both in
// the same thread. With one each, warpgroup 0 has u and warpgroup 1 g of 64 columns: they swap, so
// that 0 has the even tokens and 1 the odd ones, and groups of 128 columns take two passes over the
// rows of activations or, of few tiles, two CTAs.
#pragma once

#include "device/swiglu.cuh"
#include "ops/grouped_gemm/sm90/epilogue.cuh"
#include "ops/grouped_gemm/sm90/epilogue_quantize.cuh"

namespace narrowfloat {

// Rows of the second GEMM with a scale every 128 columns.
NF_HOST_DEVICE inline bool makes_groups(const GemmParams& params) {
  return params.activation.is_there && params.activation.format == RowFormat::kFp8Group;
}

// Passes over the rows of activations that a tile takes.
template <class Shape>
NF_HOST_DEVICE inline int passes_of(const GemmParams& params) {
  return makes_groups(params) ? Shape::kGroupPasses : 1;
}

// The epilogue of one output tile; all threads of a consumer warpgroup call it.
template <class Shape>
class TileEpilogue {
 public:
  using Sums = float[Shape::kBlocks][Shape::kSums];

  __device__ TileEpilogue(const GemmParams& params, GemmStorage<Shape>& shared,
                          const OutputTile& tile)
      : params_(params),
        shared_(shared),
        tile_{.activation = params.activation, .output = tile, .inter = params.rows / 2} {}

  __device__ void finish(int pass, int passes, Sums& sums) {
    tile_.set_thread(consumer_thread());
    if constexpr (has_row_powers(Shape::Weights::kEncoding) && !kScalesColumns) {
      if (params_.row_powers != nullptr) scale_rows(pass, sums);
    }
    if constexpr (Shape::kSharesColumns) wait_for_async_copies();
    // The factors are there.
    sync_threads(1 + tile_.warpgroup, kWarpgroup);
    if (!params_.activation.is_there) return store_sums(pass, sums);
    if constexpr (Shape::kGroupPasses == 2) {
      if (pass + 1 < passes) return activate<true>(pass, sums, Park{*this});
    }
    encode(passes - 1, sums);
  }
  // Nobody reads what the next tile will overwrite.
  __device__ void end() const {
    if (params_.activation.is_there) return sync_consumers();
    sync_threads(1 + tile_.warpgroup, kWarpgroup);
  }

 private:
  using Tile = ThreadTile<Shape>;
  static constexpr float kSumFactor = Shape::Weights::kSumFactor;
  // Whether powers of two of weight rows are factors of columns, instead of a pass over all sums.
  // Weights that become E4M3 nearly always have them, others nearly never.
  static constexpr bool kScalesColumns = Shape::Weights::kEncoding >= WeightEncoding::kMxfp4Fp8;

  __device__ const TokenFactor* factors() const { return shared_.factors[tile_.warpgroup]; }

  // Chunk after chunk of tokens, whose sums are the first ones of each n sub-tile. Where they are
  // needed again, all are in their places in the end. Code for all of a tile's tokens at once does
  // not fit the cache of instructions.
  template <bool kIsLast, int kBlocks = Shape::kBlocks, class Finish>
  __device__ void for_chunks(Sums& sums, Finish&& finish) {
#pragma unroll 1
    for (tile_.chunk = 0; tile_.chunk != Shape::kChunks; ++tile_.chunk) {
      if (Shape::kChunks == 1 || tile_.first_token() < tile_.output.num_rows) finish();
      if constexpr (Shape::kChunks > 1) {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) rotate<kIsLast>(sums[block]);
      }
    }
  }
  // The same with all chunks unrolled: no sums move, and the compiler sees which ones are meant.
  template <class Finish>
  __device__ void for_unrolled_chunks(Finish&& finish) {
#pragma unroll
    for (int chunk = 0; chunk < Shape::kChunks; ++chunk) {
      tile_.chunk = chunk;
      if (Shape::kChunks == 1 || tile_.first_token() < tile_.output.num_rows) {
        finish(chunk * Tile::kPairs);
      }
    }
  }
  template <bool kIsLast>
  __device__ static void rotate(float (&sums)[Shape::kSums]) {
    constexpr int kOfChunk = Shape::kChunkTokens / 2;
    float first[kOfChunk];
#pragma unroll
    for (int i = 0; i < kOfChunk; ++i) first[i] = sums[i];
#pragma unroll
    for (int i = 0; i + kOfChunk < Shape::kSums; ++i) sums[i] = sums[i + kOfChunk];
    if constexpr (!kIsLast) {
#pragma unroll
      for (int i = 0; i < kOfChunk; ++i) sums[Shape::kSums - kOfChunk + i] = first[i];
    }
  }

  [[nodiscard]] __device__ int block_of(int pass, int i) const {
    return tile_.output.block + pass * Shape::kTileBlocks + tile_.warpgroup * Shape::kBlocks + i;
  }

  // With kSharesColumns these are the factors of the warpgroup's columns, and the place among these
  // of the thread's first one in n sub-tile `i`.
  [[nodiscard]] __device__ const SharedColumns& shared_columns() const {
    return shared_.shared_columns[tile_.warpgroup];
  }
  [[nodiscard]] __device__ int place_of(int i) const {
    return i * kSubtileRows + tile_.thread / 32 * 16 + tile_.thread % 32 / 4 * 2;
  }
  // Columns of weights that are not paired, without a gate.
  [[nodiscard]] __device__ ThreadColumns shared_thread_columns(int pass, int i) const {
    const SharedColumns& columns = shared_columns();
    const Rows rows = rows_of(pass, i);
    return {rows.low,
            {columns.scales[0], columns.bias(params_, place_of(i), rows.low)},
            {columns.scales[0], columns.bias(params_, place_of(i) + 1, rows.high)}};
  }

  __device__ void store_sums(int pass, Sums& sums) {
    if constexpr (Shape::kSharesColumns) {
      if (params_.output_is_bf16 && !params_.image_rows.is_paired && !params_.has_gate) {
        constexpr int kLast = Shape::kBlocks - 1;
        return store_pairs({shared_thread_columns(pass, 0), sum_factors_of(pass, 0)},
                           {shared_thread_columns(pass, kLast), sum_factors_of(pass, kLast)}, sums);
      }
    }
    const ThreadColumns low(params_, tile_.output.expert, block_of(pass, 0), tile_.thread);
    const ThreadColumns high(params_, tile_.output.expert, block_of(pass, Shape::kBlocks - 1),
                             tile_.thread);
    const float2 low_sum_factors = sum_factors_of(pass, 0);
    const float2 high_sum_factors = sum_factors_of(pass, Shape::kBlocks - 1);
    if (params_.output_is_bf16 && !params_.image_rows.is_paired) {
      return store_pairs({low, low_sum_factors}, {high, high_sum_factors}, sums);
    }
    for_chunks<true>(sums, [&] {
      store_chunk({low, low_sum_factors}, sums[0]);
      if constexpr (Shape::kBlocks == 2) store_chunk({high, high_sum_factors}, sums[1]);
    });
  }
  struct ScaledColumns {
    const ThreadColumns& columns;
    float2 sum_factors;
  };
  // Stores what nearly all results are, without a branch for each: bf16 of neighbouring columns.
  __device__ void store_pairs(const ScaledColumns& low, const ScaledColumns& high,
                              const Sums& sums) const {
    if (low.columns.col >= params_.rows) return;
    const int first = tile_.thread % 4 * 2;
    const TokenFactor* own_factors = factors() + first;
    uint16_t* first_row = static_cast<uint16_t*>(params_.output) + low.columns.col +
                          (tile_.output.first_row + first) * int64_t{params_.rows};
    const int num_high = high.columns.col < params_.rows ? tile_.output.num_rows - first : 0;
#pragma unroll
    for (int i = 0; i < Shape::kTokens / 4; ++i) {
      const int token = i / 2 * 8 + i % 2;
      if (token % 32 == 0 && token >= tile_.output.num_rows) return;
      const TokenFactor factor = own_factors[token];
      uint16_t* row = first_row + int64_t{token} * params_.rows;
      const uint32_t pair = finished_pair(low, factor, sums[0], i);
      if (token < tile_.output.num_rows - first) store(row, pair);
      if constexpr (Shape::kBlocks == 2) {
        const uint32_t other = finished_pair(high, factor, sums[1], i);
        if (token < num_high) store(row + kSubtileRows, other);
      }
    }
  }
  [[nodiscard]] __device__ static uint32_t finished_pair(const ScaledColumns& own,
                                                         const TokenFactor& factor,
                                                         const float (&sums)[Shape::kSums],
                                                         int token) {
    const float2 pair = scaled_pair(sums, token, own.sum_factors);
    return to_bf16x2(finished(pair.x, factor, own.columns.factors[0]),
                     finished(pair.y, factor, own.columns.factors[1]));
  }

  __device__ void store_chunk(const ScaledColumns& own, const float (&sums)[Shape::kSums]) const {
    if (own.columns.col >= params_.rows) return;
#pragma unroll
    for (int i = 0; i < Shape::kChunkTokens / 4; ++i) {
      const int token = tile_.first_token() + i / 2 * 8 + tile_.thread % 4 * 2 + i % 2;
      if (token >= tile_.output.num_rows) continue;
      store_columns(params_, tile_.output.first_row + token, own.columns, factors()[token],
                    scaled_pair(sums, i, own.sum_factors));
    }
  }

  // Multiplies by the powers of two that prepare() took from weight rows, of which there are some.
  __device__ void scale_rows(int pass, Sums& sums) const {
#pragma unroll
    for (int i = 0; i < Shape::kBlocks; ++i) {
      const float2 powers = powers_of(pass, i);
#pragma unroll
      for (int j = 0; j < Shape::kSums; ++j) {
        sums[i][j] = __fmul_rn(sums[i][j], j / 2 % 2 == 0 ? powers.x : powers.y);
      }
    }
  }
  // Those of the thread's two rows in n sub-tile `i` of the warpgroup; padding's do not count.
  [[nodiscard]] __device__ float2 powers_of(int pass, int i) const {
    const Rows rows = rows_of(pass, i);
    if (rows.low >= params_.rows) return {1.0F, 1.0F};
    const float* powers =
        params_.row_powers + static_cast<int64_t>(tile_.output.expert) * params_.rows;
    return {powers[rows.low], powers[rows.high]};
  }

  // Factors of the sums of the thread's two columns in n sub-tile `i` of the warpgroup, which come
  // before anything else.
  [[nodiscard]] __device__ float2 sum_factors_of(int pass, int i) const {
    if constexpr (Shape::kSharesColumns) {
      const float* powers = shared_columns().powers + place_of(i);
      return {powers[0], powers[1]};
    }
    if constexpr (kScalesColumns) {
      static_assert(kSumFactor == 1.0F);
      if (params_.row_powers != nullptr) return powers_of(pass, i);
    }
    return {kSumFactor, kSumFactor};
  }

  // The caller's weight rows that the thread has of n sub-tile `i` of the warpgroup.
  struct Rows {
    int low;
    int high;
  };
  [[nodiscard]] __device__ Rows rows_of(int pass, int i) const {
    const int block = block_of(pass, i);
    const int row = tile_.thread / 32 * 16 + tile_.thread % 32 / 4 * 2;
    return {static_cast<int>(params_.image_rows.source(block, row)),
            static_cast<int>(params_.image_rows.source(block, row + 1))};
  }

  // Factors of the thread's two columns in n sub-tile `i` of the warpgroup; padding's do not count.
  struct Columns {
    float2 sum_factors;
    float scale;
    float low_bias;
    float high_bias;
  };
  [[nodiscard]] __device__ Columns columns_of(int pass, int i) const {
    const bool is_gate = (tile_.warpgroup * Shape::kBlocks + i) % 2 == 1;
    if constexpr (Shape::kSharesColumns) {
      const SharedColumns& columns = shared_columns();
      const Rows rows = rows_of(pass, i);
      return {sum_factors_of(pass, i), columns.scales[is_gate ? 1 : 0],
              columns.bias(params_, place_of(i), rows.low),
              columns.bias(params_, place_of(i) + 1, rows.high)};
    }
    const ColumnFactors factors(params_, tile_.output.expert);
    Columns columns{sum_factors_of(pass, i), factors.scale(is_gate), -0.0F, -0.0F};
    if (params_.epilogue.bias == nullptr) return columns;
    const Rows rows = rows_of(pass, i);
    if (rows.low >= params_.rows) return columns;
    columns.low_bias = factors.bias_of(rows.low);
    columns.high_bias = factors.bias_of(rows.high);
    return columns;
  }
  // The first sum of token `token` of the thread's in an n sub-tile; the other column's is 2
  // further.
  __device__ static constexpr int sum_of(int token) { return token / 2 * 4 + token % 2; }
  [[nodiscard]] __device__ static float2 scaled_pair(const float (&sums)[Shape::kSums], int token,
                                                     float2 sum_factors) {
    const int at = sum_of(token);
    return {mul_rn(sums[at], sum_factors.x), mul_rn(sums[at + 2], sum_factors.y)};
  }
  // Results of that token, in the order of sums.
  [[nodiscard]] __device__ float2 finished_pair(const Columns& columns, const TokenFactor& factor,
                                                const float (&sums)[Shape::kSums],
                                                int token) const {
    const float2 pair = scaled_pair(sums, token, columns.sum_factors);
    return {finished(pair.x, factor, {columns.scale, columns.low_bias}),
            finished(pair.y, factor, {columns.scale, columns.high_bias})};
  }

  // Calls sink(i, h) for the columns of token(i), i ascending; zeros for columns that are padding.
  // kIsLast: nobody needs the sums again.
  template <bool kIsLast, class Sink>
  __device__ void activate(int pass, Sums& sums, Sink&& sink) {
    const SwigluParameters parameters(params_.activation, tile_.output.expert);
    const bool is_padding = tile_.col(pass) >= tile_.inter;
    const auto take = [&](int i, float2 up, float2 gate) {
      const float2 h = activated(up, gate, parameters);
      sink(i, is_padding ? float2{0.0F, 0.0F} : h);
    };
    if constexpr (Tile::kHasAllTokens) {
      take_own<kIsLast>(pass, sums, take);
    } else {
      take_swapped<kIsLast>(pass, sums, take);
    }
  }

  [[nodiscard]] __device__ static float2 activated(float2 up, float2 gate,
                                                   const SwigluParameters& parameters) {
    return {fast_swiglu(up.x, gate.x, parameters), fast_swiglu(up.y, gate.y, parameters)};
  }

  template <bool kIsLast, class Take>
  __device__ void take_own(int pass, Sums& sums, Take&& take) {
    const Columns up = columns_of(pass, 0);
    const Columns gate = columns_of(pass, 1);
    const auto take_chunk = [&](int first) {
#pragma unroll
      for (int i = 0; i < Tile::kPairs; ++i) {
        const TokenFactor factor = factors()[tile_.token(i)];
        take(i, finished_pair(up, factor, sums[0], first + i),
             finished_pair(gate, factor, sums[1], first + i));
      }
    };
    if constexpr (Shape::kUnrollsChunks) {
      for_unrolled_chunks(take_chunk);
    } else {
      for_chunks<kIsLast>(sums, [&] { take_chunk(0); });
    }
  }

  template <bool kIsLast, class Take>
  __device__ void take_swapped(int pass, Sums& sums, Take&& take) {
    const Columns columns = columns_of(pass, 0);
    for_chunks<kIsLast>(sums, [&] {
#pragma unroll
      for (int first = 0; first < Tile::kPairs; first += Shape::kSwapPairs) {
        take_swapped_pairs(first, columns, sums[0], take);
      }
    });
  }
  // Through shared memory, a few tokens at a time.
  template <class Take>
  __device__ void take_swapped_pairs(int first, const Columns& columns,
                                     const float (&sums)[Shape::kSums], Take&& take) {
    constexpr int kPairs = Shape::kSwapPairs;
    auto& swap = shared_.swapped;
    const bool has_up = tile_.warpgroup == 0;
    float2 own[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const TokenFactor* two =
          factors() + tile_.first_token() + (first + i) * 8 + tile_.thread % 4 * 2;
      const float2 even = finished_pair(columns, two[0], sums, 2 * (first + i));
      const float2 odd = finished_pair(columns, two[1], sums, 2 * (first + i) + 1);
      own[i] = has_up ? even : odd;
      swap[tile_.warpgroup][i][tile_.thread] = has_up ? odd : even;
    }
    sync_consumers();
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float2 other = swap[1 - tile_.warpgroup][i][tile_.thread];
      take(first + i, has_up ? own[i] : other, has_up ? other : own[i]);
    }
    sync_consumers();
  }

  // Formats whose scales need one warp alone store token after token; others keep their values.
  __device__ void encode(int pass, Sums& sums) {
    const RowFormat format = params_.activation.format;
    if constexpr (Shape::writes(RowFormat::kBf16)) {
      if (format == RowFormat::kBf16) return activate<true>(pass, sums, Bf16Sink<Tile>(tile_));
    }
    if constexpr (Shape::writes(RowFormat::kFp8Static)) {
      if (format == RowFormat::kFp8Static)
        return activate<true>(pass, sums, Fp8StaticSink<Tile>(tile_));
    }
    if constexpr (Shape::writes(RowFormat::kNvfp4)) {
      if (format == RowFormat::kNvfp4) return activate<true>(pass, sums, Nvfp4Sink<Tile>(tile_));
    }
    if constexpr (Shape::writes(RowFormat::kMxfp8)) {
      if (format == RowFormat::kMxfp8) return encode_mxfp8(sums);
    }
    if constexpr (Shape::writes(RowFormat::kFp8Group)) {
      if (format == RowFormat::kFp8Group) return encode_groups(sums);
    }
  }

  // Values that wait for their scale take the place of u where a thread has this, else registers of
  // their own if they are few; of others the activation is made again, which costs less.
  static constexpr bool kKeepsInSums = Tile::kHasAllTokens && Shape::kChunks > 1;
  static constexpr bool kKeeps = Tile::kPairs <= 16 && Shape::kChunks == 1;
  using Kept = float2[kKeeps ? Tile::kPairs : 1];
  // The first of the chunk has this place among the sums.
  [[nodiscard]] __device__ int first_kept() const {
    return Shape::kUnrollsChunks ? tile_.chunk * Tile::kPairs : 0;
  }

  // largest_of(i, h): of the thread's columns of token(i).
  template <class LargestOf>
  __device__ void activate_for_maxima(int pass, Sums& sums, Kept& kept,
                                      const WarpMaxima<Shape>& maxima, LargestOf&& largest_of) {
    typename WarpMaxima<Shape>::OfChunk of_chunk;
    activate<false>(pass, sums, [&](int i, float2 h) {
      if constexpr (kKeeps) kept[i] = h;
      if constexpr (kKeepsInSums) {
        sums[0][sum_of(first_kept() + i)] = h.x;
        sums[0][sum_of(first_kept() + i) + 2] = h.y;
      }
      of_chunk.values[i] = largest_of(i, h);
      if (i + 1 == Tile::kPairs) maxima.put(of_chunk);
    });
  }
  template <class Sink>
  __device__ void activate_again(int pass, Sums& sums, const Kept& kept, Sink&& sink) {
    if constexpr (kKeeps) {
#pragma unroll
      for (int i = 0; i < Tile::kPairs; ++i) sink(i, kept[i]);
    } else if constexpr (kKeepsInSums) {
      const auto sink_chunk = [&](int first) {
#pragma unroll
        for (int i = 0; i < Tile::kPairs; ++i) {
          sink(i, float2{sums[0][sum_of(first + i)], sums[0][sum_of(first + i) + 2]});
        }
      };
      if constexpr (Shape::kUnrollsChunks) {
        for_unrolled_chunks(sink_chunk);
      } else {
        for_chunks<true, 1>(sums, [&] { sink_chunk(0); });
      }
    } else {
#pragma unroll
      for (int i = 0; i < Shape::kBlocks * Shape::kSums; ++i) {
        keep_apart(sums[i / Shape::kSums][i % Shape::kSums]);
      }
      activate<true>(pass, sums, sink);
    }
  }

  __device__ void encode_mxfp8(Sums& sums) {
    const WarpMaxima<Shape> maxima(tile_, shared_.maxima);
    Kept kept;
    activate_for_maxima(0, sums, kept, maxima,
                        [](int, float2 h) { return epilogue_detail::pair_max(h); });
    sync_consumers();
    activate_again(0, sums, kept, Mxfp8Sink<Shape>(tile_, maxima));
  }

  // In the last pass, with what an earlier one has parked.
  __device__ void encode_groups(Sums& sums) {
    constexpr int kLast = Shape::kGroupPasses - 1;
    const WarpMaxima<Shape> maxima(tile_, shared_.maxima);
    Kept kept;
    activate_for_maxima(kLast, sums, kept, maxima, [&](int i, float2 h) {
      const float largest = epilogue_detail::pair_max(h);
      if constexpr (kLast == 0) {
        return largest;
      } else {
        return fmaxf(largest, epilogue_detail::pair_max(parked(i)));
      }
    });
    sync_consumers();
    make_group_scales(tile_, maxima, shared_);
    sync_consumers();
    if constexpr (kLast > 0) {
      Fp8GroupSink<Shape> sink(tile_, 0, shared_.maxima);
#pragma unroll 1
      for (tile_.chunk = 0; tile_.chunk != Shape::kChunks; ++tile_.chunk) {
#pragma unroll
        for (int i = 0; i < Tile::kPairs; ++i) sink(i, parked(i));
      }
    }
    activate_again(kLast, sums, kept, Fp8GroupSink<Shape>(tile_, kLast, shared_.maxima));
  }

  // Results of the first of two passes, each thread's own.
  [[nodiscard]] __device__ float2& parked(int i) const {
    return shared_
        .parked[tile_.chunk * Tile::kPairs + i][tile_.warpgroup * kWarpgroup + tile_.thread];
  }
  struct Park {
    const TileEpilogue& epilogue;
    __device__ void operator()(int i, float2 h) const { epilogue.parked(i) = h; }
  };

  const GemmParams& params_;
  GemmStorage<Shape>& shared_;
  Tile tile_;
};

}  // namespace narrowfloat
