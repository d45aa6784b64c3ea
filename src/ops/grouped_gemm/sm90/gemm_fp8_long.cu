// The GEMM of E4M3 weights for long token tiles whose rows lie one behind the other, as those of a
// layer's second GEMM do and those of a caller who has permuted them: what gemm_kernel.cuh does
// with tiles of 128 tokens and gathered rows, to the bit. Rows and weights come as boxes of
// tensors, which one thread requests and which need no fence, results leave as such.
//
//   block   producer warpgroup | consumer warpgroup 0: tokens 0 to 63 | warpgroup 1: 64 to 127
//   stage   128 columns of 128 tokens (16 KB) and of 192 weight rows (24 KB), scales of both
//   team    two blocks of a cluster with neighbouring token tiles; each copies half of the weights
//           to both
//   work    (192 weight rows) x (token tile), persistent blocks over all of them (work_list.cuh);
//           64 weight rows behind the last 192 of an expert are an item of their own
#include <algorithm>
#include <cuda_runtime.h>

#include "base/int_math.h"
#include "device/ptx/grid_dependency.cuh"
#include "ops/grouped_gemm/sm90/finish_long_tile.cuh"
#include "ops/grouped_gemm/sm90/long_tile_loop.cuh"
#include "ops/grouped_gemm/sm90/long_tile_producer.cuh"
#include "runtime/cuda/launch.h"
#include "runtime/cuda/shared_memory_opt_in.h"

namespace narrowfloat {
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
