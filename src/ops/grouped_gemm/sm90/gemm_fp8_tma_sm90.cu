// The GEMM of E4M3 weights for long token tiles whose rows lie one behind the other, as those of a
// layer's second GEMM do and those of a caller who has permuted them: what gemm_kernel_sm90.cuh
// does with tiles of 128 tokens and gathered rows, to the bit. Rows and weights come as boxes of
// tensors, which one thread requests and which need no fence, results leave as such.
//
//   block   producer warpgroup | consumer warpgroup 0: tokens 0 to 63 | warpgroup 1: 64 to 127
//   stage   128 columns of 128 tokens (16 KB) and of 192 weight rows (24 KB), scales of both
//   team    two blocks of a cluster with neighbouring token tiles; each copies half of the weights
//           to both
//   work    (192 weight rows) x (token tile), persistent blocks over all of them
//   (tile_scheduler.cuh);
//           64 weight rows behind the last 192 of an expert are an item of their own
#include <algorithm>
#include <cstddef>
#include <cuda_runtime.h>

#include "base/float_ops.h"
#include "base/int_math.h"
#include "device/ptx/async_copy.cuh"
#include "device/ptx/cluster.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/ptx/keep.cuh"
#include "device/ptx/tensor_copy.cuh"
#include "device/ptx/wgmma.cuh"
#include "device/register_budget.h"
#include "device/ring.cuh"
#include "ops/grouped_gemm/sm90/epilogue.cuh"
#include "ops/grouped_gemm/sm90/tile_scheduler.cuh"
#include "ops/grouped_gemm/sm90/weight_decoder.cuh"
#include "runtime/cuda/launch.h"
#include "runtime/cuda/shared_memory_opt_in.h"
#include "runtime/cuda/tensor_map.h"

namespace narrowfloat {

// Tiles of 128 tokens and 192 weight rows, E4M3 both, for rows that lie one behind the other: what
// they take of a multiprocessor, and what their kernel reads (gemm_fp8_tma_sm90.cu). An expert's
// last panel of 64 weight rows, where it is alone, is a narrow tile of its own.

struct LongTile {
  static constexpr int kTokens = 128;
  static constexpr int kPieceTokens = kTokens;
  static constexpr int kTileBlocks = 3;  // Panels of 64 weight rows.
  // Blocks of threads that form a cluster and multiply neighbouring token tiles with the same
  // weights: what one copies of these from L2 serves both.
  static constexpr int kTeam = 2;
  static constexpr int kRowTeam = 1;
  static constexpr int kStages = 4;
  static constexpr int kConsumers = 2;  // Warpgroups; each has half of the tokens.
  static constexpr int kWarps = kConsumers * 4;
  static constexpr int kCopyWarps = 3;  // Of the producer's four; the last one finds items.
  static constexpr int kThreads = (1 + kConsumers) * 128;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;
  static_assert(fits_registers(kThreads, 1, kProducerRegisters, kConsumerRegisters));

  // The weight rows in two chunks, of which each has half of every panel: rows 32c to 32c + 31 of
  // the three. A block of a team copies one chunk for both.
  static constexpr int kChunks = 2;
  static constexpr int kPanelPart = kUnitRows / kChunks;
  static constexpr int kPanelSums = kPanelPart / 2;  // Of a thread, a panel and a chunk.
  static constexpr int kWeightBytes = kTileBlocks * kUnitRows * kUnitRowBytes;
  static constexpr int kRowBytes = kTokens * kUnitRowBytes;
  static constexpr int kPanelPartBytes = kPanelPart * kUnitRowBytes;

  // Results of a warp on their way to memory: a box of 16 tokens x 128 bytes for each panel.
  static constexpr int kWarpTokens = 16;
  static constexpr int kBoxBytes = kWarpTokens * 128;
};

// How results of whole groups of 16 tokens leave shared memory.
enum class LongTileStore : uint8_t {
  kRows,    // By the warp, as those of fewer tokens do.
  kBoxes,   // Each panel as a box.
  kPanels,  // All panels as one box.
};

struct LongTileParams {
  GemmParams gemm;
  TensorMap weights;         // [block of any expert][row of 128 bytes in its units][128 bytes]
  TensorMap narrow_weights;  // The same, of which a box has one block.
  TensorMap rows;            // [row][bytes], in the 128-byte swizzle.
  TensorMap output;          // Likewise: [row][column], for kPanels [panel][row][column].
  LongTileStore store;
  bool has_plain_factors;  // PlainFactors (gemm_fp8_tma_sm90.cu) are all there are.
};

struct LongTileStorage {
  uint8_t rows[LongTile::kStages][LongTile::kRowBytes];
  uint8_t weights[LongTile::kStages][LongTile::kWeightBytes];
  uint8_t results[LongTile::kWarps][LongTile::kTileBlocks][LongTile::kBoxBytes];
  float token_scales[LongTile::kStages][LongTile::kTokens];
  float weight_scales[LongTile::kStages][4];
  TokenFactor tokens[LongTile::kTokens];
  alignas(16) ColumnFactor columns[LongTile::kConsumers][LongTile::kTileBlocks * kUnitRows];
  RingBarriers<LongTile::kStages> barriers;
  ItemQueue queue;
  uint64_t next_item_wanted;  // A phase for each item; the producer's warps among themselves.
  PublishedItems items;
};

// With narrow items where one panel is left.
using LongTileList = WorkListOf<true>;
using LongTileRing = Ring<LongTile::kStages>;
using LongTilePosition = RingPosition<LongTile::kStages>;

// Of 64 tokens and the weight rows of `kPanels` panels, in a thread: 4j + 2h + i is token 16w + q +
// 8h and row 8j + 2c + i of the chunks (packed_weights.h).
template <int kPanels>
using LongTileSums = float[LongTile::kChunks * kPanels * LongTile::kPanelSums];

// The producer warpgroup of the kernel for long tiles (gemm_fp8_tma_sm90.cu), by warps:
//
//   0      requests weights and rows as boxes, by its first lane; three copy the panels' scales
//   1, 2   copy the tokens' scales, a lane those of two
//   3      finds items and tells all others, which takes 2500 cycles: while those copy, or the ring
//          would run empty between two items

class LongTileProducer {
 public:
  __device__ LongTileProducer(const LongTileParams& params, LongTileStorage& shared,
                              const LongTileRing& ring)
      : params_(params),
        gemm_(params.gemm),
        shared_(shared),
        ring_(ring),
        thread_(static_cast<int>(threadIdx.x) % 128) {}

  // With tiles_are_complete (gemm_kernel_sm90.cuh), by the first thread of any warpgroup, before
  // previous kernels are done: the first item's weights, as many stages as the ring has.
  __device__ void request_weights() {
    const LongTileList work(gemm_, shared_.queue, WorkTiling::of<LongTile>(1), true);
    if (!work.has_next()) return;
    const WorkItem item = work.item();
    if (!item.has_copies) return;
    for (int unit = 0; unit < min(gemm_.units, LongTile::kStages); ++unit) {
      copy_weights(item, unit);
      at_.advance();
    }
  }

  __device__ void run() {
    if (thread_ / 32 == LongTile::kCopyWarps) {
      find_items();
    } else {
      copy_items();
    }
  }

 private:
  // An item is chosen when the one before has so many units left to copy: late, as blocks that are
  // ahead of others shall take more of them.
  static constexpr int kUnitsAhead = 5;

  __device__ void find_items() const {
    const bool is_first_lane = thread_ % 32 == 0;
    LongTileList work(gemm_, shared_.queue, WorkTiling::of<LongTile>(1));
    for (; work.has_next(); work.next()) {
      const WorkItem item = work.item();
      if (is_first_lane) {
        items().publish(work.taken(), item);
        wait_for_phase(shared_address(&shared_.next_item_wanted), work.taken() % 2);
        work.choose_next();
      }
    }
    if (is_first_lane) items().publish(work.taken(), {.block = kNoBlock});
  }

  __device__ void copy_items() {
    ItemRing list = items();
    for (bool is_first = true; list.has_item(); is_first = false) {
      const WorkItem item = list.item();
      list.advance(thread_ % 32);
      if (item.has_copies) {
        copy_item(item, gemm_.tiles_are_complete && is_first);
      } else {
        want_next_item();
      }
    }
  }
  __device__ void want_next_item() const {
    if (thread_ == 0) arrive(shared_address(&shared_.next_item_wanted));
  }
  [[nodiscard]] __device__ ItemRing items() const { return ItemRing(shared_.items); }

  // is_requested: the weights of the ring's first round.
  __device__ void copy_item(const WorkItem& item, bool is_requested) {
    find_scales(item);
    const int last_units = max(gemm_.units - kUnitsAhead, 0);
    for (int unit = 0; unit < gemm_.units; ++unit) {
      ring_.wait_empty(at_);
      if (unit == last_units) want_next_item();
      if (thread_ == 0) {
        if (!is_requested || unit >= LongTile::kStages) copy_weights(item, unit);
        copy_rows(item, unit);
      }
      copy_scales();
      arrive_after_copies(ring_.full(at_));
      at_.advance();
    }
  }

  // By one thread. Where two blocks share weights, each copies a chunk for both. Panels behind an
  // expert's last are those of the next, or zeros; nothing is stored of them.
  __device__ void copy_weights(const WorkItem& item, int unit) const {
    constexpr int kUnitLines = unit_stride(WeightCoding::kFp8) / kUnitRowBytes;
    const uint32_t full = ring_.full(at_);
    const uint32_t chunk_bytes =
        (item.is_narrow ? 1 : LongTile::kTileBlocks) * LongTile::kPanelPartBytes;
    const uint32_t bytes = LongTile::kRowBytes + LongTile::kChunks * chunk_bytes;
    arrive_and_expect(full, item.num_rows > 0 ? bytes : 0);
    if (item.num_rows <= 0) return;
    const TensorMap* map = item.is_narrow ? &params_.narrow_weights : &params_.weights;
    const uint32_t chunks = shared_address(shared_.weights[at_.stage]);
    const int block = item.expert * gemm_.blocks + item.block;
    if (item.is_shared) {
      const int chunk = static_cast<int>(cluster_rank());
      copy_box_to_blocks(chunks + chunk * chunk_bytes, map, 0,
                         unit * kUnitLines + chunk * LongTile::kPanelPart, block, full,
                         (1U << LongTile::kTeam) - 1);
      return;
    }
    for (int chunk = 0; chunk < LongTile::kChunks; ++chunk) {
      copy_box(chunks + chunk * chunk_bytes, map, 0,
               unit * kUnitLines + chunk * LongTile::kPanelPart, block, full);
    }
  }

  // Behind copy_weights(), which expects their bytes. Rows behind the item's last are others'.
  __device__ void copy_rows(const WorkItem& item, int unit) const {
    if (item.num_rows <= 0) return;
    copy_box(shared_address(shared_.rows[at_.stage]), &params_.rows, unit * kUnitRowBytes,
             static_cast<int>(item.first_row), ring_.full(at_));
  }

  [[nodiscard]] __device__ bool copies_token_scales() const { return thread_ >= 32; }
  [[nodiscard]] __device__ int first_token() const { return thread_ - 32; }
  static constexpr int kTokenDistance = 64;  // To the lane's other one.

  __device__ void find_scales(const WorkItem& item) {
    if (copies_token_scales()) {
      first_scale_ = token_scale(item, first_token());
      second_scale_ = token_scale(item, first_token() + kTokenDistance);
      scale_step_ = gemm_.group_stride * static_cast<int64_t>(sizeof(float));
    } else {
      first_scale_ = panel_scale(item, thread_);
      scale_step_ = unit_stride(WeightCoding::kFp8);
    }
  }
  // Of the first unit; null where there is none.
  [[nodiscard]] __device__ const uint8_t* token_scale(const WorkItem& item, int token) const {
    if (token >= item.num_rows) return nullptr;
    const int64_t row = item.first_row + token;
    return reinterpret_cast<const uint8_t*>(gemm_.group_scales + row * gemm_.group_row_stride);
  }
  [[nodiscard]] __device__ const uint8_t* panel_scale(const WorkItem& item, int panel) const {
    const int block = item.block + panel;
    if (panel >= LongTile::kTileBlocks || block >= gemm_.blocks) return nullptr;
    return gemm_.image + item.expert * gemm_.expert_bytes + block * gemm_.block_bytes +
           unit_code_bytes(WeightCoding::kFp8);
  }

  // Of the stage's unit; units come one after the other.
  __device__ void copy_scales() {
    const uint32_t target = copies_token_scales()
                                ? shared_address(&shared_.token_scales[at_.stage][first_token()])
                                : shared_address(&shared_.weight_scales[at_.stage][thread_]);
    copy_scale(target, first_scale_);
    copy_scale(target + kTokenDistance * sizeof(float), second_scale_);
  }
  __device__ void copy_scale(uint32_t target, const uint8_t*& scale) const {
    if (scale == nullptr) return;
    copy_4(target, scale, 4);
    scale += scale_step_;
  }

  const LongTileParams& params_;
  const GemmParams& gemm_;
  LongTileStorage& shared_;
  const LongTileRing& ring_;
  int thread_;
  LongTilePosition at_;
  // What the thread copies next.
  const uint8_t* first_scale_ = nullptr;
  const uint8_t* second_scale_ = nullptr;
  int64_t scale_step_ = 0;
};

// The main loop of a consumer warpgroup for long tiles (gemm_fp8_tma_sm90.cu). Both operands are in
// shared memory; tokens are wgmma's 64 rows, so that a thread has sums of two tokens, whose factors
// are two registers. A warpgroup has 64 tokens and all weight rows of a stage.
//
// Sums start anew with every unit, 128 columns, and are added to fp32 registers, times the factors
// of token and weights. While a warpgroup adds its set, the other one's instructions keep the
// tensor cores busy. An instruction has all weight rows: the tokens are read once for them.

class LongTileLoop {
 public:
  __device__ LongTileLoop(int units, LongTileStorage& shared, const LongTileRing& ring)
      : units_(units),
        shared_(shared),
        ring_(ring),
        // From a lane, so that the compiler knows it to be the same in all.
        warpgroup_(__shfl_sync(0xFFFFFFFFU, static_cast<int>(threadIdx.x) / 128 - 1, 0)),
        thread_(static_cast<int>(threadIdx.x) % 128) {}

  template <int kPanels>
  __device__ void multiply(LongTileSums<kPanels>& sums) {
#pragma unroll
    for (float& sum : sums) sum = 0;
#pragma unroll 1
    for (int unit = 0; unit < units_; ++unit) {
      ring_.wait_full(at_);
      const auto scales = load_scales<kPanels>();
      LongTileSums<kPanels> unit_sums;
      issue(unit_sums);
      wgmma_wait();
      release();
      promote<kPanels>(unit_sums, scales, sums);
    }
  }

  // Without rows of its own: for an item whose copies the others need.
  __device__ void pass() {
#pragma unroll 1
    for (int unit = 0; unit < units_; ++unit) {
      ring_.wait_full(at_);
      release();
    }
  }

 private:
  // Of a stage: of a thread's two tokens, and of the panels.
  template <int kPanels>
  struct Scales {
    float tokens[2];
    float weights[kPanels];
  };

  static constexpr uint32_t kRows = offsetof(LongTileStorage, rows);
  static constexpr uint32_t kWeights = offsetof(LongTileStorage, weights);
  static constexpr uint32_t kTokenScales = offsetof(LongTileStorage, token_scales);
  static constexpr uint32_t kWeightScales = offsetof(LongTileStorage, weight_scales);

  // Of the stage's part of a member that begins at `offset`. All from one address: the compiler
  // would make each member's anew for every unit, which takes 60 cycles.
  [[nodiscard]] __device__ uint32_t stage_of(uint32_t offset, uint32_t bytes) const {
    return shared_address(&shared_) + offset + static_cast<uint32_t>(at_.stage) * bytes;
  }

  template <int kSums>
  __device__ void issue(float (&unit_sums)[kSums]) const {
    const uint32_t first_token = stage_of(kRows, LongTile::kRowBytes) + warpgroup_ * 64 * 128;
    const uint64_t tokens = swizzled_descriptor(first_token);
    const uint64_t weights = swizzled_descriptor(stage_of(kWeights, LongTile::kWeightBytes));
    wgmma_fence();
    multiply_unit(unit_sums, tokens, weights);
    wgmma_commit();
  }

  // In front of the first instruction: a load among them would hold up the last of them.
  template <int kPanels>
  __device__ Scales<kPanels> load_scales() const {
    Scales<kPanels> scales;
    const uint32_t tokens =
        stage_of(kTokenScales, sizeof(LongTileStorage::token_scales[0])) +
        static_cast<uint32_t>(warpgroup_ * 256 + thread_ / 32 * 64 + thread_ % 32 / 4 * 4);
    const uint32_t weights = stage_of(kWeightScales, sizeof(LongTileStorage::weight_scales[0]));
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      scales.weights[panel] = bits_float(load_shared(weights + panel * 4));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) scales.tokens[i] = bits_float(load_shared(tokens + i * 32));
    return scales;
  }

  template <int kPanels>
  __device__ static void promote(const LongTileSums<kPanels>& unit_sums,
                                 const Scales<kPanels>& scales, LongTileSums<kPanels>& sums) {
    constexpr int kChunkSums = kPanels * LongTile::kPanelSums;
    float factors[2][kPanels];
#pragma unroll
    for (int i = 0; i < 2 * kPanels; ++i) {
      factors[i % 2][i / 2] = __fmul_rn(scales.tokens[i % 2], scales.weights[i / 2]);
    }
#pragma unroll
    for (int i = 0; i < LongTile::kChunks * kChunkSums; ++i) {
      const int panel = i % kChunkSums / LongTile::kPanelSums;
      sums[i] = __fmaf_rn(factors[i / 2 % 2][panel], unit_sums[i], sums[i]);
    }
  }

  // The other block's producer writes here, too.
  __device__ void release() {
    __syncwarp();
    if (thread_ % 32 < LongTile::kTeam) arrive_in_block(ring_.empty(at_), thread_ % 32);
    at_.advance();
  }

  int units_;
  LongTileStorage& shared_;
  const LongTileRing& ring_;
  int warpgroup_;
  int thread_;
  LongTilePosition at_;
};

// As epilogue.cuh, for long tiles (gemm_fp8_tma_sm90.cu): a warp has all columns of 16 tokens.
// They go to shared memory as a box of 16 rows of 128 bytes for each panel, in the 128-byte
// swizzle, and from there to the output as boxes, which is done beside the next item.
//
//   bf16   boxes of 64 columns, once
//   fp32   boxes of a chunk's 32 columns, then of the other's
//
// All panels' boxes are one where they lie side by side. Where a warp has fewer tokens, u or g is
// padded, or both are interleaved in the output, the warp itself copies what there is, 16 bytes or
// a column at a time (LongTileStore).

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

namespace {

__device__ void sync_team() {
  arrive_at_cluster();
  wait_for_cluster();
}

__device__ void init_barriers(LongTileStorage& shared, const LongTileRing& ring) {
  init_barrier(shared_address(&shared.next_item_wanted), 1);
  ring.init(LongTile::kCopyWarps * 32 + 1, LongTile::kTeam * LongTile::kWarps);
  // A warp takes items from the list, and tells the others.
  WorkList::init(shared.queue, LongTile::kTeam);
  ItemRing::init(shared.items, LongTile::kCopyWarps + LongTile::kWarps);
}

template <int kPanels>
__device__ void multiply_item(const LongTileParams& params, LongTileStorage& shared,
                              const WorkItem& item, LongTileLoop& loop) {
  const LongTileFinisher<kPanels> finisher(params, shared, item);
  finisher.load_factors();
  LongTileSums<kPanels> sums;
  loop.multiply<kPanels>(sums);
  finisher.finish(sums);
}

__device__ void consume_item(const LongTileParams& params, LongTileStorage& shared,
                             const WorkItem& item, LongTileLoop& loop) {
  const int first_token = static_cast<int>(threadIdx.x) / 128 * 64 - 64;
  if (item.num_rows <= first_token) {
    if (item.has_copies) loop.pass();
  } else if (item.is_narrow) {
    multiply_item<1>(params, shared, item, loop);
  } else {
    multiply_item<LongTile::kTileBlocks>(params, shared, item, loop);
  }
}

__device__ void consume(const LongTileParams& params, LongTileStorage& shared,
                        const LongTileRing& ring) {
  LongTileLoop loop(params.gemm.units, shared, ring);
  ItemRing items(shared.items);
  for (; items.has_item(); items.advance(static_cast<int>(threadIdx.x) % 32)) {
    consume_item(params, shared, items.item(), loop);
  }
  wait_for_boxes_read();
}

__global__ void __launch_bounds__(LongTile::kThreads, 1)
    multiply_groups_long_kernel(const __grid_constant__ LongTileParams params) {
  // Compiles to nothing elsewhere, where supports() refuses to run.
  if constexpr (kHasWgmma) {
    NF_DYNAMIC_SHARED(uint8_t, shared_bytes, 1024);
    auto& shared = *reinterpret_cast<LongTileStorage*>(shared_bytes);
    const LongTileRing ring(shared.barriers);
    if (threadIdx.x == 0) init_barriers(shared, ring);
    sync_team();
    // By a consumer: it has nothing to do yet.
    if (params.gemm.tiles_are_complete && threadIdx.x == 128) {
      LongTileProducer(params, shared, ring).request_weights();
    }
    wait_for_previous_grids();
    if (threadIdx.x < 128) {
      give_registers<LongTile::kProducerRegisters>();
      LongTileProducer(params, shared, ring).run();
      trigger_dependent_launch();
    } else {
      take_registers<LongTile::kConsumerRegisters>();
      consume(params, shared, ring);
    }
    // The other block may still write here, or arrive at barriers.
    sync_team();
  }
}

// All experts' units as lines of 128 bytes.
TensorMap weight_map(const GemmParams& gemm, int panels) {
  constexpr int kLines = unit_stride(WeightCoding::kFp8) / kUnitRowBytes;
  return make_tensor_map({.data = gemm.image,
                          .dimensions = 3,
                          .extents = {kUnitRowBytes, int64_t{gemm.units} * kLines,
                                      int64_t{gemm.experts} * gemm.blocks},
                          .strides = {kUnitRowBytes, gemm.block_bytes},
                          .box = {kUnitRowBytes, LongTile::kPanelPart, panels}});
}

// Panels of u and of g lie apart, those that are interleaved or padded are no boxes. One box of
// several panels does not end where the last one has fewer columns.
LongTileStore store_of(const GemmParams& gemm) {
  const ImageRows& image = gemm.image_rows;
  if (!image.is_paired) {
    return gemm.rows % kUnitRows == 0 ? LongTileStore::kPanels : LongTileStore::kBoxes;
  }
  const bool has_boxes = !image.are_interleaved() && image.rows % (2 * kUnitRows) == 0;
  return has_boxes ? LongTileStore::kBoxes : LongTileStore::kRows;
}

TensorMap output_map(const GemmParams& gemm, int element_bytes) {
  const int box_cols = 128 / element_bytes;
  const int64_t row_bytes = int64_t{gemm.rows} * element_bytes;
  if (store_of(gemm) != LongTileStore::kPanels) {
    return make_tensor_map({.data = gemm.output,
                            .element_bytes = element_bytes,
                            .extents = {gemm.rows, gemm.row_limit, 1},
                            .strides = {row_bytes, 0},
                            .box = {box_cols, LongTile::kWarpTokens, 1},
                            .is_swizzled = true});
  }
  // Panels lie side by side, so that a step of the last dimension is shorter than one of the rows.
  return make_tensor_map({.data = gemm.output,
                          .element_bytes = element_bytes,
                          .dimensions = 3,
                          .extents = {kUnitRows, gemm.row_limit, gemm.blocks},
                          .strides = {row_bytes, int64_t{kUnitRows} * element_bytes},
                          .box = {box_cols, LongTile::kWarpTokens, LongTile::kTileBlocks},
                          .is_swizzled = true});
}

LongTileParams params_of(const GemmParams& gemm) {
  return {.gemm = gemm,
          .weights = weight_map(gemm, LongTile::kTileBlocks),
          .narrow_weights = weight_map(gemm, 1),
          .rows = make_row_boxes(gemm, LongTile::kTokens),
          .output = output_map(gemm, gemm.output_is_bf16 ? 2 : 4),
          .store = store_of(gemm),
          .has_plain_factors = has_plain_factors(gemm)};
}

}  // namespace

bool takes_long_tiles(const GemmParams& gemm) {
  constexpr int64_t kMost = int64_t{1} << 31;
  const int64_t blocks = int64_t{gemm.experts} * gemm.blocks;
  return gemm.row_to_token == nullptr && !gemm.activation.is_there && gemm.row_limit > 0 &&
         gemm.input_rows < kMost && blocks > 0 && blocks < kMost;
}

void launch_gemm_fp8_long(const GemmParams& gemm, const GemmLaunch& shape, Stream stream) {
  constexpr auto* kKernel = multiply_groups_long_kernel;
  static SharedMemoryOptIn opt_in;
  opt_in.allow(reinterpret_cast<const void*>(kKernel), sizeof(LongTileStorage), shape.device);
  const int64_t pieces = int64_t{gemm.max_tiles} * gemm.splits;
  const int64_t most =
      ceil_div(pieces, int64_t{LongTile::kTeam}) * ceil_div(gemm.blocks, LongTile::kTileBlocks);
  const int64_t resident = std::max(1, shape.num_sms / LongTile::kTeam);
  const auto blocks = static_cast<unsigned>(std::min(most, resident) * LongTile::kTeam);
  launch(kKernel,
         {dim3(blocks), dim3(LongTile::kThreads), sizeof(LongTileStorage), LongTile::kTeam}, stream,
         params_of(gemm));
}

}  // namespace narrowfloat
