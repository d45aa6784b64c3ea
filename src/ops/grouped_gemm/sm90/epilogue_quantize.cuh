// From a tile of the activation's results in registers to rows of the second GEMM, with the bytes
// of tensor/row_encoder.h.
//
//   a thread      two neighbouring columns of each of its tokens
//   8 lanes       16 columns of four tokens: a block of NVFP4; maxima by shuffles
//   2 warps       32 columns: a block of MXFP8
//   8 warps       128 columns, in 8 warps at once, in 4 one after the other, or in 4 of each of two
//                 CTAs: a group of FP8 1x128
//
// Maxima of several warps meet in shared memory. Rows that the second GEMM takes as bf16 are left
// as such beside their codes where the layer asks for it (moe_shared/dequantized_rows.h).
#pragma once

#include "device/decode_codes.cuh"
#include "device/device_math.cuh"
#include "device/group_scale.cuh"
#include "device/ptx/convert.cuh"
#include "device/ptx/keep.cuh"
#include "device/reduce.cuh"
#include "device/vector_io.cuh"
#include "formats/block_codes.h"
#include "formats/registry.h"
#include "ops/grouped_gemm/sm90/gemm_config.cuh"
#include "ops/grouped_gemm/sm90/tile_scheduler.cuh"

namespace narrowfloat {

// The thread's number among the consumers. Computed again each time, so that addresses made from it
// take no registers of main loops.
__device__ inline int consumer_thread() {
  return static_cast<int>(keep_in_register(threadIdx.x)) - kWarpgroup;
}

// The consumer warpgroups, by the barrier that they share.
__device__ inline void sync_consumers() { sync_threads(1 + kConsumers, kConsumers * kWarpgroup); }

// A thread's part of a chunk of a tile's tokens: values [i] are those of token(i), columns col and
// col + 1.
template <class Shape>
struct ThreadTile {
  // Two warpgroups with the same columns have every second token each.
  static constexpr bool kHasAllTokens = Shape::kBlocks == 2;
  static constexpr int kPairs = kHasAllTokens ? Shape::kChunkTokens / 4 : Shape::kChunkTokens / 8;

  const FusedActivation& activation;
  OutputTile output;
  int inter;          // Columns of the result.
  int warpgroup = 0;  // Among the consumers.
  int thread = 0;     // In the warpgroup.
  int chunk = 0;

  __device__ void set_thread(int consumer_thread) {
    warpgroup = consumer_thread / kWarpgroup;
    thread = consumer_thread % kWarpgroup;
  }

  [[nodiscard]] __device__ int first_token() const {
    return Shape::kChunks == 1 ? 0 : chunk * Shape::kChunkTokens;
  }
  [[nodiscard]] __device__ int token(int i) const { return own_token() + step(i); }
  [[nodiscard]] __device__ bool has_token(int i) const {
    return step(i) < output.num_rows - own_token();
  }
  // In pass `pass`; the tile's padding is at or above `inter`.
  [[nodiscard]] __device__ int col(int pass) const {
    const int block =
        output.block + pass * Shape::kTileBlocks + (kHasAllTokens ? 2 * warpgroup : 0);
    return block / 2 * kSubtileRows + thread / 32 * 16 + thread % 32 / 4 * 2;
  }
  // The row of token(0), and how many bytes after it that of token(i) is.
  [[nodiscard]] __device__ uint8_t* first_row() const {
    return activation.values + (output.first_row + own_token()) * activation.row_bytes;
  }
  [[nodiscard]] __device__ uint64_t row_after_first(int i) const {
    return uint64_t{static_cast<uint32_t>(step(i))} * static_cast<uint32_t>(activation.row_bytes);
  }
  // Columns col and col + 1 of token(i), as bf16.
  __device__ void store_decoded(int i, int col, uint32_t pair) const {
    store(activation.decoded + (output.first_row + own_token()) * inter + col +
              uint64_t{static_cast<uint32_t>(step(i))} * static_cast<uint32_t>(inter),
          pair);
  }
  template <typename Scale>
  __device__ void store_scale(int token, int block, Scale scale) const {
    static_cast<Scale*>(
        activation.scales)[(output.first_row + token) * activation.scale_row_stride +
                           block * activation.scale_block_stride] = scale;
  }
  // One lane of the eight that share columns of a token.
  [[nodiscard]] __device__ bool leads() const { return thread % 32 < 4; }

 private:
  // token(0), and how far token(i) is from it.
  [[nodiscard]] __device__ int own_token() const {
    return first_token() + thread % 4 * 2 + (kHasAllTokens ? 0 : warpgroup);
  }
  [[nodiscard]] __device__ static constexpr int step(int i) {
    return kHasAllTokens ? i / 2 * 8 + i % 2 : i * 8;
  }
};

namespace epilogue_detail {

// Maxima of two values, and over the eight lanes that have columns of the same token; numbers win
// over NaN.
__device__ inline float pair_max(float2 pair) { return fmaxf(fabsf(pair.x), fabsf(pair.y)); }
__device__ inline float lanes_max(float value) {
#pragma unroll
  for (int distance = 4; distance < 32; distance *= 2) {
    value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, distance));
  }
  return value;
}

// Maxima of kCount tokens at once, over the eight lanes that have columns of the same ones:
// shuffles of one token do not wait for those of another, and at every step lanes share the tokens,
// as long as their number is even. A lane is left with those of kShare tokens, at `values`.
template <int kCount>
struct LaneMaxima {
  static constexpr int kHalvings = kCount % 8 == 0   ? 3
                                   : kCount % 4 == 0 ? 2
                                   : kCount % 2 == 0 ? 1
                                                     : 0;
  static constexpr int kShare = kCount >> kHalvings;
  float values[kCount];

  // Called by all lanes of the warp.
  __device__ void reduce(int lane) {
    step<16, kCount>(lane);
    step<8, kCount / (kHalvings > 0 ? 2 : 1)>(lane);
    step<4, kCount / (kHalvings > 1 ? 4 : kHalvings > 0 ? 2 : 1)>(lane);
  }
  // The token whose maximum is values[i].
  [[nodiscard]] __device__ static int token(int lane, int i) {
    int token = i << kHalvings;
#pragma unroll
    for (int bit = 0; bit < kHalvings; ++bit) token += (lane >> (4 - bit) & 1) << bit;
    return token;
  }
  // One of the lanes that are left with the same.
  [[nodiscard]] __device__ static bool leads(int lane) {
    return (lane & ((32 >> kHalvings) - 4)) == 0;
  }

 private:
  template <int kDistance, int kNumber>
  __device__ void step(int lane) {
    if constexpr (kNumber % 2 == 0) {
      const bool is_high = (lane & kDistance) != 0;
#pragma unroll
      for (int i = 0; i < kNumber / 2; ++i) {
        const float low = values[2 * i];
        const float high = values[2 * i + 1];
        values[i] = larger<kDistance>(is_high ? high : low, is_high ? low : high);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kNumber; ++i) values[i] = larger<kDistance>(values[i], values[i]);
    }
  }
  // The larger of one's own and what the other lane gives.
  template <int kDistance>
  [[nodiscard]] __device__ static float larger(float own, float given) {
    return fmaxf(own, __shfl_xor_sync(kFullWarp, given, kDistance));
  }
};

template <BlockFormat Format>
__device__ inline float maximum_of_block(float amax) {
  return Format::kAmaxOfNanIsNan || !is_nan(amax) ? amax : 0.0F;
}

// The scale of FP8 1x128, from the maximum of the numbers.
__device__ inline BlockScale<float> scale_of_group(float amax) {
  const QuickGroupScale quick = quick_group_scale(amax);
  return quick.is_right ? quick.scale : group_scale(amax);
}

__device__ inline uint16_t two_e4m3(float2 pair, float multiplier) {
  return to_e4m3x2(__fmul_rn(pair.x, multiplier), __fmul_rn(pair.y, multiplier));
}

__device__ inline uint32_t four_e4m3(const float4& h, float multiplier) {
  return static_cast<uint32_t>(two_e4m3({h.x, h.y}, multiplier)) |
         static_cast<uint32_t>(two_e4m3({h.z, h.w}, multiplier)) << 16;
}

}  // namespace epilogue_detail

// It says where a thread's columns of a chunk's tokens go. From the first row's address others are
// one multiplication away: that makes a store three instructions under a predicate, where the
// compiler would compute every address again under a branch.
template <class Tile>
class RowPlaces {
 public:
  // The address of byte `byte` of token(i)'s row, i ascending from 0.
  __device__ uint8_t* of(const Tile& tile, int i, int byte) {
    if (i == 0) first_ = keep_global_in_register(tile.first_row() + byte);
    return first_ + tile.row_after_first(i);
  }

 private:
  uint8_t* first_ = nullptr;
};

// Sinks take the results of a thread, one pair of columns after the other.
template <class Tile>
class Bf16Sink {
 public:
  __device__ explicit Bf16Sink(const Tile& tile) : tile_(tile), col_(tile.col(0)) {}
  __device__ void operator()(int i, float2 pair) {
    const uint32_t words = to_bf16x2(pair.x, pair.y);
    uint8_t* place = places_.of(tile_, i, 2 * col_);
    if (col_ < tile_.inter && tile_.has_token(i)) store(place, words);
  }

 private:
  const Tile& tile_;
  int col_;
  RowPlaces<Tile> places_;
};

template <class Tile>
class Fp8StaticSink {
 public:
  __device__ explicit Fp8StaticSink(const Tile& tile)
      : tile_(tile),
        col_(tile.col(0)),
        multiplier_(tile.activation.multiplier.of(tile.output.expert)) {}
  __device__ void operator()(int i, float2 pair) {
    const uint16_t codes = epilogue_detail::two_e4m3(pair, multiplier_);
    uint8_t* place = places_.of(tile_, i, col_);
    if (col_ < tile_.inter && tile_.has_token(i)) store(place, codes);
  }

 private:
  const Tile& tile_;
  int col_;
  RowPlaces<Tile> places_;
  float multiplier_;
};

template <class Tile>
class Nvfp4Sink {
 public:
  __device__ explicit Nvfp4Sink(const Tile& tile)
      : tile_(tile),
        col_(tile.col(0)),
        scales_(Nvfp4::scale_pair<Math>(tile.activation.multiplier.of(tile.output.expert))) {}
  __device__ void operator()(int i, float2 pair) {
    uint8_t* place = places_.of(tile_, i, col_ / 2);
    const float amax = epilogue_detail::lanes_max(epilogue_detail::pair_max(pair));
    const auto scale = Nvfp4::block_scale<Math>(amax, scales_, BlockRules{});
    if (col_ >= tile_.inter || !tile_.has_token(i)) return;
    const uint32_t low = Nvfp4::encode<Math>(pair.x, scale.multiplier);
    const uint32_t high = Nvfp4::encode<Math>(pair.y, scale.multiplier);
    const uint32_t codes = high << 4 | low;
    store(place, static_cast<uint8_t>(codes));
    if (tile_.activation.decoded != nullptr) {
      tile_.store_decoded(i, col_, decode_e2m1x2(codes, E4M3::decode(scale.stored)));
    }
    if (tile_.leads()) tile_.store_scale(tile_.token(i), col_ / 16, canonical_scale(scale.stored));
  }

 private:
  using Math = DeviceExactMath;
  const Tile& tile_;
  int col_;
  RowPlaces<Tile> places_;
  ScalePair scales_;
};

// The maxima of a tile's warps, [warp of the tile's columns][token].
template <class Shape>
class WarpMaxima {
 public:
  using Tile = ThreadTile<Shape>;
  static constexpr int kWarps = 4 * Shape::kBlocks;

  __device__ WarpMaxima(const Tile& tile, float* shared_maxima)
      : tile_(tile),
        shared_(shared_maxima),
        warp_((Tile::kHasAllTokens ? 4 * tile.warpgroup : 0) + tile.thread / 32) {}

  // Maxima of the thread's columns of each token(i) of the chunk; all lanes of the warp call put().
  using OfChunk = epilogue_detail::LaneMaxima<Tile::kPairs>;
  __device__ void put(OfChunk& maxima) const {
    const int lane = tile_.thread % 32;
    maxima.reduce(lane);
    if (!OfChunk::leads(lane)) return;
#pragma unroll
    for (int i = 0; i < OfChunk::kShare; ++i) {
      shared_[warp_ * Shape::kTokens + tile_.token(OfChunk::token(lane, i))] = maxima.values[i];
    }
  }
  // Over `count` warps from `warp` on, a multiple of it.
  template <int kCount>
  [[nodiscard]] __device__ float of(int warp, int token) const {
    float largest = shared_[warp * Shape::kTokens + token];
#pragma unroll
    for (int i = 1; i < kCount; ++i) {
      largest = fmaxf(largest, shared_[(warp + i) * Shape::kTokens + token]);
    }
    return largest;
  }
  [[nodiscard]] __device__ int warp() const { return warp_; }

 private:
  const Tile& tile_;
  float* shared_;
  int warp_;
};

// Reads maxima that all warps have put.
template <class Shape>
class Mxfp8Sink {
 public:
  using Tile = ThreadTile<Shape>;

  __device__ Mxfp8Sink(const Tile& tile, const WarpMaxima<Shape>& maxima)
      : tile_(tile), maxima_(maxima), col_(tile.col(0)) {}
  __device__ void operator()(int i, float2 pair) {
    uint8_t* place = places_.of(tile_, i, col_);
    if (col_ >= tile_.inter || !tile_.has_token(i)) return;
    const float amax = maxima_.template of<2>(maxima_.warp() / 2 * 2, tile_.token(i));
    const auto scale = Mxfp8::block_scale<DeviceExactMath>(amax, ScalePair{}, BlockRules{});
    store(place, epilogue_detail::two_e4m3(pair, scale.multiplier));
    if (tile_.leads() && maxima_.warp() % 2 == 0) {
      tile_.store_scale(tile_.token(i), col_ / 32, canonical_scale(scale.stored));
    }
  }

 private:
  const Tile& tile_;
  const WarpMaxima<Shape>& maxima_;
  int col_;
  RowPlaces<Tile> places_;
};

// One thread a token makes the scale of its group of 128 columns and leaves the multiplier in place
// of the first maximum; in each CTA of a cluster, of which one stores the scale.
template <class Shape>
__device__ inline void make_group_scales(const ThreadTile<Shape>& tile,
                                         const WarpMaxima<Shape>& maxima,
                                         GemmStorage<Shape>& shared) {
  const int token = tile.warpgroup * kWarpgroup + tile.thread;
  if (token >= Shape::kTokens) return;
  float largest = maxima.template of<WarpMaxima<Shape>::kWarps>(0, token);
  bool stores = token < tile.output.num_rows;
  if constexpr (Shape::kNSplit > 1) {
    largest = shared.cluster_maxima.over_cluster(token, largest);
    stores = stores && cluster_rank() == 0;
  }
  const float amax = epilogue_detail::maximum_of_block<Fp8Block1x128>(largest);
  const auto scale = epilogue_detail::scale_of_group(amax);
  shared.maxima[token] = scale.multiplier;
  if (stores) {
    tile.store_scale(token, tile.output.block / 4, canonical_scale(scale.stored));
  }
}

// With those multipliers; columns of pass `pass`.
template <class Shape>
class Fp8GroupSink {
 public:
  using Tile = ThreadTile<Shape>;

  __device__ Fp8GroupSink(const Tile& tile, int pass, const float* shared_multipliers)
      : tile_(tile), multipliers_(shared_multipliers), col_(tile.col(pass)) {}
  __device__ void operator()(int i, float2 pair) {
    const uint16_t codes = epilogue_detail::two_e4m3(pair, multipliers_[tile_.token(i)]);
    uint8_t* place = places_.of(tile_, i, col_);
    const bool is_there = col_ < tile_.inter && tile_.has_token(i);
    if (is_there) store(place, codes);
    if constexpr (kIsDecoded) {
      if (is_there && tile_.activation.decoded != nullptr) {
        tile_.store_decoded(i, col_, decode_e4m3x2(codes, 1.0F));
      }
    }
  }

 private:
  static constexpr bool kIsDecoded = activation_bytes(Shape::Weights::kEncoding) == 2;
  const Tile& tile_;
  const float* multipliers_;
  int col_;
  RowPlaces<Tile> places_;
};

}  // namespace narrowfloat
