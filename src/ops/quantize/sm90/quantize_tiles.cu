// sm90 quantizer of FP8 with 128x128 blocks (spec 6.8).
//
//   scale = rule(max |x| of the tile), codes = E4M3(x * multiplier)
//
// A CTA of 512 threads holds a tile in registers between its maximum and its codes: one pass over
// memory. Eight threads share a row of the tile, 16 elements each, and a thread has a row in each
// half of the tile; tiles at the right and lower edge hold zeros beyond the tensor, which change no
// maximum. Adjacent tiles have adjacent CTAs.
//
//   load | maximum, one barrier | scale | codes, stores
//
// Rows of a norm come with their 1 / rms: prepare_norm_rows.cu stored it at the beginning of the
// tile's rows in the values, where it is read before the barrier and overwritten by codes after it.
//
// Bound by memory: 3 bytes per element of bf16.
#include "device/encode_block.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "ops/quantize/sm90/quantize_rows.cuh"
#include "ops/quantize/sm90/quantize_rows.h"
#include "ops/quantize/sm90/quantize_tiles.h"
#include "ops/quantize/sm90/scale_stores.cuh"
#include "ops/quantize/sm90/visit_sources.cuh"
#include "runtime/cuda/launch.h"

namespace narrowfloat {
namespace {

using Format = Fp8Block128x128;

constexpr int kTileRows = 128;
constexpr int kRun = 16;
constexpr int kThreads = 512;
constexpr int kThreadsPerRow = kTileCols / kRun;
constexpr int kRuns = kTileRows * kThreadsPerRow / kThreads;
constexpr int kRowStep = kThreads / kThreadsPerRow;

struct TileGrid {
  FastDivisor tiles_per_row;
  FastDivisor rows_of_tiles;  // Rows of tiles per batch.
};

// The sources of a tile. load() returns 16 elements from column `col` on; factor is 1 / rms of the
// row, where has_row_factor() says that there is one.
template <class Half>
struct TilePlainRows {
  using Elements = PackedElements<Half, kRun>;
  static constexpr int kRegisters = 40;  // Three CTAs fit on an SM.

  __device__ static bool has_row_factor(const QuantizeParams& /*params*/) { return false; }
  __device__ static Elements load(const QuantizeParams& params, const uint8_t* row, int64_t col,
                                  float /*factor*/) {
    return PlainRows<Half>::template load<kRun>(params, row, col, 1.0F);
  }
};

// The other sources of bf16: SiLU, smoothing, and the results of a norm's first kernel in `input`
// and `vector`.
template <class Math>
struct TileFusedRows {
  using Elements = PackedElements<PackedBf16, kRun>;
  static constexpr bool kIsFast = Math::kMode == MathMode::kFast;
  static constexpr int kRegisters = kIsFast ? 72 : 64;  // Two CTAs fit on an SM in exact mode.

  static bool takes(const QuantizeParams& params) {
    return params.row_input == RowInput::kSmooth || params.row_input == RowInput::kNormBf16 ||
           (params.row_input == RowInput::kSiluBf16 && params.is_fast == kIsFast);
  }
  __device__ static bool has_row_factor(const QuantizeParams& params) {
    return params.row_input == RowInput::kNormBf16;
  }
  __device__ static Elements load(const QuantizeParams& params, const uint8_t* row, int64_t col,
                                  float factor) {
    if (params.row_input == RowInput::kNormBf16) {
      const auto h = load_elements<Elements>(row + col * sizeof(uint16_t));
      return NormRows<PackedBf16>::finish(params, h, static_cast<uint32_t>(col), factor);
    }
    if (params.row_input == RowInput::kSmooth) {
      return SmoothRows::load<kRun>(params, row, col, 1.0F);
    }
    return SiluRows<PackedBf16, Math>::template load<kRun>(params, row, col, 1.0F);
  }
};

template <class Math>
struct TileAnyRows {
  using Elements = FloatElements<kRun>;
  static constexpr int kRegisters = 80;

  __device__ static bool has_row_factor(const QuantizeParams& params) {
    return params.row_input == RowInput::kNormF16;
  }
  __device__ static Elements load(const QuantizeParams& params, const uint8_t* row, int64_t col,
                                  float factor) {
    if (params.row_input == RowInput::kNormF16) {
      const auto h = load_elements<PackedElements<PackedF16, kRun>>(row + col * sizeof(uint16_t));
      return widened(NormRows<PackedF16>::finish(params, h, static_cast<uint32_t>(col), factor));
    }
    return AnyRows<Format, Math>::template load<kRun>(params, row, col, 1.0F);
  }
};

struct TilePlace {
  uint32_t batch;
  uint32_t tile_row;
  uint32_t tile_col;
};

__device__ inline TilePlace place_of_tile(const TileGrid& grid) {
  const uint32_t band = grid.tiles_per_row.quotient(blockIdx.x);
  const uint32_t batch = grid.rows_of_tiles.quotient(band);
  return {batch, band - batch * grid.rows_of_tiles.divisor(),
          blockIdx.x - band * grid.tiles_per_row.divisor()};
}

// The locations of a thread's runs.
struct TileRuns {
  int64_t first_row;  // Run i is in the row first_row + i * kRowStep of the batch.
  int64_t col;

  __device__ int64_t row(int i) const { return first_row + i * kRowStep; }
  __device__ bool is_inside(const QuantizeParams& params, int i) const {
    return row(i) < params.rows && col < params.cols;
  }
};

__device__ inline TileRuns runs_of_thread(const TilePlace& place) {
  return {int64_t{place.tile_row} * kTileRows + threadIdx.x / kThreadsPerRow,
          int64_t{place.tile_col} * kTileCols + threadIdx.x % kThreadsPerRow * kRun};
}

// The values of a row of the tensor.
__device__ inline uint8_t* value_row(const QuantizeParams& params, const TilePlace& place,
                                     int64_t row) {
  return params.values + (place.batch * params.rows + row) * params.value_row_bytes;
}

template <class Source>
__device__ inline auto load_run(const QuantizeParams& params, const TilePlace& place, int64_t row,
                                int64_t col) {
  const uint8_t* input =
      params.input + place.batch * params.input_batch_stride + row * params.input_row_stride;
  float factor = 1.0F;
  if (Source::has_row_factor(params)) {
    const uint8_t* values = value_row(params, place, row) + int64_t{place.tile_col} * kTileCols;
    factor = *reinterpret_cast<const float*>(values);
  }
  return Source::load(params, input, col, factor);
}

template <class Math, class Source>
__global__ void __maxnreg__(Source::kRegisters)
    quantize_tiles_kernel(const __grid_constant__ QuantizeParams params,
                          const __grid_constant__ TileGrid grid) {
  __shared__ uint32_t shared_maxima[kThreads / kWarpSize];
  wait_for_previous_grids();
  const TilePlace place = place_of_tile(grid);
  const TileRuns runs = runs_of_thread(place);
  typename Source::Elements elements[kRuns]{};
#pragma unroll
  for (int i = 0; i < kRuns; ++i) {
    if (runs.is_inside(params, i)) {
      elements[i] = load_run<Source>(params, place, runs.row(i), runs.col);
    }
  }
  trigger_dependent_launch();
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kRuns; ++i) {
    const uint32_t number = elements[i].max_number();
    largest = max(largest, number > kInfinityBits ? 0U : number);
  }
  const float amax = bits_float(block_max(largest, shared_maxima));
  const BlockScale<float> scale =
      Format::template block_scale<Math>(amax, ScalePair{}, params.rules);
#pragma unroll
  for (int i = 0; i < kRuns; ++i) {
    if (!runs.is_inside(params, i)) continue;
    store_codes(general_codes<Format, Math>(elements[i], scale.multiplier),
                value_row(params, place, runs.row(i)) + runs.col);
  }
  if (threadIdx.x == 0) {
    const float stored = canonical_nan(scale.stored);
    store_scale(params.scales, place.batch, place.tile_row, place.tile_col, stored);
    store_scale(params.extra_scales, place.batch, place.tile_row, place.tile_col, stored);
  }
}

template <class Math, class Source>
void launch_quantize_tiles_of(const QuantizeProblem& problem, const QuantizeParams& params,
                              Stream stream) {
  const int64_t tiles_per_row = ceil_div(problem.cols, kTileCols);
  const int64_t rows_of_tiles = ceil_div(problem.rows, kTileRows);
  const TileGrid grid{FastDivisor(static_cast<uint32_t>(tiles_per_row)),
                      FastDivisor(static_cast<uint32_t>(rows_of_tiles))};
  const auto tiles = static_cast<unsigned>(problem.batch * rows_of_tiles * tiles_per_row);
  launch(quantize_tiles_kernel<Math, Source>, {dim3(tiles), dim3(kThreads)}, stream, params, grid);
}

}  // namespace

void launch_quantize_tiles(const QuantizeProblem& problem, const QuantizeParams& params,
                           Stream stream) {
  visit_device_math(effective_math(problem), [&]<class Math>() {
    if (params.row_input == RowInput::kBf16) {
      return launch_quantize_tiles_of<Math, TilePlainRows<PackedBf16>>(problem, params, stream);
    }
    if (params.row_input == RowInput::kF16) {
      return launch_quantize_tiles_of<Math, TilePlainRows<PackedF16>>(problem, params, stream);
    }
    if (TileFusedRows<Math>::takes(params)) {
      return launch_quantize_tiles_of<Math, TileFusedRows<Math>>(problem, params, stream);
    }
    launch_quantize_tiles_of<Math, TileAnyRows<Math>>(problem, params, stream);
  });
}

Support tile_extents(const QuantizeProblem& problem) {
  const int64_t tiles = problem.batch * ceil_div(problem.rows, kTileRows);
  if (tiles * ceil_div(problem.cols, kTileCols) < (int64_t{1} << 31)) return Support::yes();
  return Support::no("blocks must be below 2^31");
}

}  // namespace narrowfloat
