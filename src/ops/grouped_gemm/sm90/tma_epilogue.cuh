// The epilogue of the TMA kernel (gemm_fp8_tma_sm90.cu).
#pragma once

#include "base/float_ops.h"
#include "device/ptx/async_copy.cuh"
#include "device/ptx/keep.cuh"
#include "device/ptx/tensor_copy.cuh"
#include "ops/grouped_gemm/sm90/tma_tile.cuh"

namespace narrowfloat {

// A warp has all columns of 16 tokens. They go to shared memory as a box of 16 rows
// of 128 bytes for each subtile, in the 128-byte swizzle, and from there to the output as boxes,
// while the next tile is multiplied.
//
//   bf16   boxes of 64 columns, once
//   fp32   boxes of a chunk's 32 columns, then of the other's
//
// All subtiles' boxes are one where they lie side by side. Where a warp has fewer tokens, u or g is
// padded, or both are interleaved in the output, the warp itself copies what there is, 16 bytes or
// a column at a time (TmaStore).

// Whether a call has no bias, slot weights, scales of rows, or scales that differ within a subtile.
inline bool has_plain_factors(const GemmParams& params) {
  const bool has_tokens = params.epilogue.slot_weights != nullptr || params.row_scale != nullptr;
  const bool has_columns =
      params.epilogue.bias != nullptr || (params.has_gate && !params.image_rows.is_paired);
  return !has_tokens && !has_columns;
}

// Factors that all tokens of a tile share, and all columns of a subtile: has_plain_factors().
template <int kSubtiles>
struct PlainFactors {
  float scales[kSubtiles];

  __device__ PlainFactors(const GemmParams& params, const OutputTile& tile) {
    const ColumnFactors columns(params, tile.expert);
#pragma unroll
    for (int subtile = 0; subtile < kSubtiles; ++subtile) {
      scales[subtile] = columns.scale(params.has_gate && (tile.block + subtile) % 2 == 1);
    }
  }
  // of[i]: the sum of the i-th of four neighbouring columns of a subtile.
  __device__ float4 finish(int /*half*/, int subtile, int /*row*/, const float (&of)[4]) const {
    const float scale = scales[subtile];
    return {mul_rn(scale, of[0]), mul_rn(scale, of[1]), mul_rn(scale, of[2]), mul_rn(scale, of[3])};
  }
};

// Factors of two tokens of a thread, and of columns in shared memory, from the thread's first one.
struct LoadedFactors {
  TokenFactor tokens[2];
  const ColumnFactor* columns;

  __device__ float4 finish(int half, int subtile, int row, const float (&of)[4]) const {
    const ColumnFactor* four = columns + subtile * kSubtileRows + row;
    return {finished(of[0], tokens[half], four[0]), finished(of[1], tokens[half], four[1]),
            finished(of[2], tokens[half], four[2]), finished(of[3], tokens[half], four[3])};
  }
};

// Stores one output tile of `kSubtiles` subtiles; a consumer warpgroup has 64 of its tokens.
template <int kSubtiles>
class TmaEpilogue {
 public:
  using Sums = TmaSums<kSubtiles>;

  __device__ TmaEpilogue(const TmaGemmParams& params, TmaStorage& shared, const OutputTile& tile)
      : params_(params), gemm_(params.gemm), shared_(shared), tile_(tile) {}

  // Before the main loop, for those that are not plain.
  __device__ void load_factors() const {
    if (params_.has_plain_factors) return;
    const int thread = static_cast<int>(threadIdx.x) % 128;
    const int consumer = static_cast<int>(threadIdx.x) / 128 - 1;
    const int token = consumer * 64 + thread;
    if (thread < 64 && token < tile_.num_rows) {
      shared_.tokens[token] = load_factor(gemm_, tile_.first_row + token);
    }
    for (int block = 0; block < kSubtiles; block += 2) {
      if (thread >= (kSubtiles - block) * kSubtileRows) break;
      load_column_factors(gemm_, tile_, tile_.block + block, thread,
                          shared_.columns[consumer] + block * kSubtileRows);
    }
  }

  __device__ void finish(const Sums& sums) const {
    const Place place(shared_, tile_);
    if (params_.has_plain_factors) return stage(place, Plain(gemm_, tile_), sums);
    const int consumer = place.warp / 4;
    sync_threads(1 + consumer, 128);
    const TokenFactor* tokens = shared_.tokens + place.token(place.lane / 4);
    const LoadedFactors factors{{tokens[0], tokens[8]},
                                shared_.columns[consumer] + place.lane % 4 * 4};
    stage(place, factors, sums);
    // The next tile's factors come to the same place.
    sync_threads(1 + consumer, 128);
  }

 private:
  using Plain = PlainFactors<kSubtiles>;
  static constexpr int kBoxChunks = TmaTile::kWarpTokens * 8;  // A chunk has 16 bytes.

  // It says where a warp's results go, which is computed after the main loop. The tile lies in
  // shared memory: all of it that is needed is loaded at once, before the results are made.
  struct Place {
    int warp;  // Counted among the consumers' warps.
    int lane;
    uint32_t results;
    int block;
    int first_row;  // The first of the warp's 16 in the output.
    int num_rows;   // The tile has so many from there on; may be negative.

    __device__ Place(const TmaStorage& shared, const OutputTile& tile)
        : warp(static_cast<int>(keep_in_register(threadIdx.x)) / 32 - 4),
          lane(static_cast<int>(keep_in_register(threadIdx.x)) % 32),
          results(shared_address(shared.results[warp])),
          block(tile.block),
          first_row(static_cast<int>(tile.first_row) + token(0)),
          num_rows(tile.num_rows - token(0)) {}
    // The tile's token for one of the warp's 16 rows.
    [[nodiscard]] __device__ int token(int row) const { return warp * TmaTile::kWarpTokens + row; }
  };

  template <class Factors>
  __device__ void stage(const Place& place, const Factors& factors, const Sums& sums) const {
    begin_stage();
    if (gemm_.output_is_bf16) {
      stage_chunk<uint16_t, 0>(place, factors, sums);
      stage_chunk<uint16_t, 1>(place, factors, sums);
      store_boxes<uint16_t>(place, 0);
    } else {
      stage_chunk<float, 0>(place, factors, sums);
      store_boxes<float>(place, 0);
      begin_stage();
      stage_chunk<float, 1>(place, factors, sums);
      store_boxes<float>(place, TmaTile::kSubtilePart);
    }
  }
  __device__ static void begin_stage() {
    wait_for_boxes_read();
    __syncwarp();
  }

  // The subtiles' order of rows makes 16g + 4c to 16g + 4c + 3 of sums 8g + 2h + {0, 4, 1, 5}.
  template <class Element, int kChunk, class Factors>
  __device__ static void stage_chunk(const Place& place, const Factors& factors, const Sums& sums) {
    constexpr bool kIsBf16 = sizeof(Element) == 2;
    const int row = place.lane / 4;
    const int own = kIsBf16 ? place.lane % 4 / 2 : place.lane % 4;  // Its 16 bytes of a group.
    const uint32_t first =
        place.results + static_cast<uint32_t>(row * 128 + (kIsBf16 ? place.lane % 2 * 8 : 0));
    const auto swizzled = static_cast<uint32_t>(own ^ row);
#pragma unroll
    for (int i = 0; i < 4 * kSubtiles; ++i) {
      const int group = i / 2;  // A group has 16 columns; two are of a subtile.
      const int half = i % 2;
      const int subtile_row = kChunk * TmaTile::kSubtilePart + group % 2 * 16;
      const float* four =
          sums + (kChunk * kSubtiles * TmaTile::kSubtileSums + 8 * group + 2 * half);
      const float4 values =
          factors.finish(half, group / 2, subtile_row, {four[0], four[4], four[1], four[5]});
      constexpr uint32_t kGroupChunks = kIsBf16 ? 2 : 4;
      const uint32_t chunk = (kIsBf16 ? kChunk * 4U : 0U) + group % 2 * kGroupChunks;
      const uint32_t target =
          first + group / 2 * TmaTile::kBoxBytes + half * 8 * 128 + (chunk ^ swizzled) * 16;
      if constexpr (kIsBf16) {
        store_shared_8(target, to_bf16x2(values.x, values.y), to_bf16x2(values.z, values.w));
      } else {
        store_shared_16(target, {canonical_bits(values.x), canonical_bits(values.y),
                                 canonical_bits(values.z), canonical_bits(values.w)});
      }
    }
  }
  __device__ static uint32_t canonical_bits(float value) {
    return float_bits(canonical_nan(value));
  }

  // Boxes that begin with column `first` of their subtiles.
  template <class Element>
  __device__ void store_boxes(const Place& place, int first) const {
    fence_async_proxy();
    __syncwarp();
    // Boxes leave out columns after the output's last, but not tokens after the tile's last.
    const bool is_whole = place.num_rows >= TmaTile::kWarpTokens;
    if (!is_whole || params_.store == TmaStore::kRows) {
      return store_rows<Element>(place, first);
    }
    if (params_.store == TmaStore::kSubtiles) {
      if (place.lane == 0) {
        store_box(&params_.output, first, place.first_row, place.block, place.results);
      }
    } else if (const int block = place.block + place.lane;
               place.lane < kSubtiles && block < gemm_.blocks) {
      store_box(&params_.output, static_cast<int>(gemm_.image_rows.source(block, first)),
                place.first_row, place.results + place.lane * TmaTile::kBoxBytes);
    }
    commit_boxes();
  }

  [[nodiscard]] __device__ bool is_interleaved() const {
    return gemm_.image_rows.are_interleaved();
  }

  template <class Element>
  __device__ void store_rows(const Place& place, int first) const {
    constexpr int kCols = 16 / sizeof(Element);
#pragma unroll 1
    for (int i = place.lane; i < kSubtiles * kBoxChunks; i += 32) {
      const int subtile = i / kBoxChunks;
      const int row = i % kBoxChunks / 8;
      if (row >= place.num_rows) continue;
      const uint4 values =
          load_shared_16(place.results + static_cast<uint32_t>(subtile * TmaTile::kBoxBytes +
                                                               row * 128 + (i ^ row) % 8 * 16));
      Element* output =
          static_cast<Element*>(gemm_.output) + (int64_t{place.first_row} + row) * gemm_.rows;
      store_columns<Element>(place.block + subtile, first + i % 8 * kCols, values, output);
    }
  }

  // Stores 16 bytes of a token's columns, from row `row` of a subtile on. Rows come in multiples
  // of 16.
  template <class Element>
  __device__ void store_columns(int block, int row, const uint4& values, Element* output) const {
    const int64_t column = gemm_.image_rows.source(block, row);
    if (column >= gemm_.rows) return;
    if (!is_interleaved()) return store(output + column, values);
    const uint32_t words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
    for (int i = 0; i < static_cast<int>(16 / sizeof(Element)); ++i) {
      if constexpr (sizeof(Element) == 2) {
        output[column + 2 * i] = static_cast<uint16_t>(words[i / 2] >> i % 2 * 16);
      } else {
        output[column + 2 * i] = bits_float(words[i]);
      }
    }
  }

  const TmaGemmParams& params_;
  const GemmParams& gemm_;
  TmaStorage& shared_;
  const OutputTile& tile_;
};

}  // namespace narrowfloat
