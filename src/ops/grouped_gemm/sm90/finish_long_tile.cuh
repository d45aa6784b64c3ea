// As finish_tokens.cuh, for long tiles (long_tile.cuh): a warp has all columns of 16 tokens.
// They go to shared memory as a box of 16 rows of 128 bytes for each panel, in the 128-byte
// swizzle, and from there to the output as boxes, which is done beside the next item.
//
//   bf16   boxes of 64 columns, once
//   fp32   boxes of a chunk's 32 columns, then of the other's
//
// All panels' boxes are one where they lie side by side. Where a warp has fewer tokens, u or g is
// padded, or both are interleaved in the output, the warp itself copies what there is, 16 bytes or
// a column at a time (LongTileStore).
#pragma once

#include "device/ptx/keep.cuh"
#include "device/ptx/tensor_copy.cuh"
#include "ops/grouped_gemm/sm90/finish_tokens.cuh"
#include "ops/grouped_gemm/sm90/long_tile.cuh"

namespace narrowfloat {

// A call without bias, slot weights, scales of rows, and scales that differ within a panel.
inline bool has_plain_factors(const GemmParams& params) {
  const bool has_tokens = params.epilogue.slot_weights != nullptr || params.row_scale != nullptr;
  const bool has_columns =
      params.epilogue.bias != nullptr || (params.has_gate && !params.image_rows.is_paired);
  return !has_tokens && !has_columns;
}

// Factors that all tokens of an item share, and all columns of a panel: has_plain_factors().
template <int kPanels>
struct PlainFactors {
  float scales[kPanels];

  __device__ PlainFactors(const GemmParams& params, const WorkItem& item) {
    const ColumnFactors columns(params, item.expert);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      scales[panel] = columns.scale(params.has_gate && (item.block + panel) % 2 == 1);
    }
  }
  // of[i]: the sum of the i-th of four neighbouring columns of a panel.
  __device__ float4 finish(int /*half*/, int panel, int /*row*/, const float (&of)[4]) const {
    const float scale = scales[panel];
    return {mul_rn(scale, of[0]), mul_rn(scale, of[1]), mul_rn(scale, of[2]), mul_rn(scale, of[3])};
  }
};

// Of two tokens of a thread, and of columns in shared memory, from the thread's first one on.
struct LoadedFactors {
  TokenFactor tokens[2];
  const ColumnFactor* columns;

  __device__ float4 finish(int half, int panel, int row, const float (&of)[4]) const {
    const ColumnFactor* four = columns + panel * kUnitRows + row;
    return {finished(of[0], tokens[half], four[0]), finished(of[1], tokens[half], four[1]),
            finished(of[2], tokens[half], four[2]), finished(of[3], tokens[half], four[3])};
  }
};

// Of one work item of `kPanels` panels, by the threads of a consumer warpgroup, whose tokens are 64
// of the tile's.
template <int kPanels>
class LongTileFinisher {
 public:
  using Sums = LongTileSums<kPanels>;

  __device__ LongTileFinisher(const LongTileParams& params, LongTileStorage& shared,
                              const WorkItem& item)
      : params_(params), gemm_(params.gemm), shared_(shared), item_(item) {}

  // In front of the main loop, for those that are not plain.
  __device__ void load_factors() const {
    if (params_.has_plain_factors) return;
    const int thread = static_cast<int>(threadIdx.x) % 128;
    const int consumer = static_cast<int>(threadIdx.x) / 128 - 1;
    const int token = consumer * 64 + thread;
    if (thread < 64 && token < item_.num_rows) {
      shared_.tokens[token] = load_factor(gemm_, item_.first_row + token);
    }
    for (int block = 0; block < kPanels; block += 2) {
      if (thread >= (kPanels - block) * kUnitRows) break;
      load_column_factors(gemm_, item_, item_.block + block, thread,
                          shared_.columns[consumer] + block * kUnitRows);
    }
  }

  __device__ void finish(const Sums& sums) const {
    const Place place(shared_, item_);
    if (params_.has_plain_factors) return stage(place, Plain(gemm_, item_), sums);
    const int consumer = place.warp / 4;
    sync_threads(1 + consumer, 128);
    const TokenFactor* tokens = shared_.tokens + place.token(place.lane / 4);
    const LoadedFactors factors{{tokens[0], tokens[8]},
                                shared_.columns[consumer] + place.lane % 4 * 4};
    stage(place, factors, sums);
    // The next item's factors come to the same place.
    sync_threads(1 + consumer, 128);
  }

 private:
  using Plain = PlainFactors<kPanels>;
  static constexpr int kBoxChunks = LongTile::kWarpTokens * 8;  // Of 16 bytes.

  // A warp's, made anew behind the main loop. The item lies in shared memory: what is asked of it
  // is loaded at once, not behind the results, each value for itself.
  struct Place {
    int warp;  // Of the consumers'.
    int lane;
    uint32_t results;
    int block;
    int first_row;  // Of the warp's 16 in the output.
    int num_rows;   // That the item has from there on; may be negative.

    __device__ Place(const LongTileStorage& shared, const WorkItem& item)
        : warp(static_cast<int>(keep_in_register(threadIdx.x)) / 32 - 4),
          lane(static_cast<int>(keep_in_register(threadIdx.x)) % 32),
          results(shared_address(shared.results[warp])),
          block(item.block),
          first_row(static_cast<int>(item.first_row) + token(0)),
          num_rows(item.num_rows - token(0)) {}
    // Of the tile, of a warp's 16.
    [[nodiscard]] __device__ int token(int row) const { return warp * LongTile::kWarpTokens + row; }
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
      store_boxes<float>(place, LongTile::kPanelPart);
    }
  }
  __device__ static void begin_stage() {
    wait_for_boxes_read();
    __syncwarp();
  }

  // The panels' order of rows makes 16g + 4c to 16g + 4c + 3 of sums 8g + 2h + {0, 4, 1, 5}.
  template <class Element, int kChunk, class Factors>
  __device__ static void stage_chunk(const Place& place, const Factors& factors, const Sums& sums) {
    constexpr bool kIsBf16 = sizeof(Element) == 2;
    const int row = place.lane / 4;
    const int own = kIsBf16 ? place.lane % 4 / 2 : place.lane % 4;  // Of the 16 bytes of a group.
    const uint32_t first =
        place.results + static_cast<uint32_t>(row * 128 + (kIsBf16 ? place.lane % 2 * 8 : 0));
    const auto swizzled = static_cast<uint32_t>(own ^ row);
#pragma unroll
    for (int i = 0; i < 4 * kPanels; ++i) {
      const int group = i / 2;  // Of 16 columns, two of a panel.
      const int half = i % 2;
      const int panel_row = kChunk * LongTile::kPanelPart + group % 2 * 16;
      const float* four = sums + (kChunk * kPanels * LongTile::kPanelSums + 8 * group + 2 * half);
      const float4 values =
          factors.finish(half, group / 2, panel_row, {four[0], four[4], four[1], four[5]});
      constexpr uint32_t kGroupChunks = kIsBf16 ? 2 : 4;
      const uint32_t chunk = (kIsBf16 ? kChunk * 4U : 0U) + group % 2 * kGroupChunks;
      const uint32_t target =
          first + group / 2 * LongTile::kBoxBytes + half * 8 * 128 + (chunk ^ swizzled) * 16;
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

  // Boxes that begin with column `first` of their panels.
  template <class Element>
  __device__ void store_boxes(const Place& place, int first) const {
    fence_async_proxy();
    __syncwarp();
    // Columns behind the output's last are not stored, tokens behind the item's last would be.
    const bool is_whole = place.num_rows >= LongTile::kWarpTokens;
    if (!is_whole || params_.store == LongTileStore::kRows) {
      return store_rows<Element>(place, first);
    }
    if (params_.store == LongTileStore::kPanels) {
      if (place.lane == 0) {
        store_box(&params_.output, first, place.first_row, place.block, place.results);
      }
    } else if (const int block = place.block + place.lane;
               place.lane < kPanels && block < gemm_.blocks) {
      store_box(&params_.output, static_cast<int>(gemm_.image_rows.source(block, first)),
                place.first_row, place.results + place.lane * LongTile::kBoxBytes);
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
    for (int i = place.lane; i < kPanels * kBoxChunks; i += 32) {
      const int panel = i / kBoxChunks;
      const int row = i % kBoxChunks / 8;
      if (row >= place.num_rows) continue;
      const uint4 values =
          load_shared_16(place.results + static_cast<uint32_t>(panel * LongTile::kBoxBytes +
                                                               row * 128 + (i ^ row) % 8 * 16));
      Element* output =
          static_cast<Element*>(gemm_.output) + (int64_t{place.first_row} + row) * gemm_.rows;
      store_columns<Element>(place.block + panel, first + i % 8 * kCols, values, output);
    }
  }

  // 16 bytes of a token's columns, from row `row` of a block on. Rows come in multiples of 16.
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

  const LongTileParams& params_;
  const GemmParams& gemm_;
  LongTileStorage& shared_;
  const WorkItem& item_;
};

}  // namespace narrowfloat
