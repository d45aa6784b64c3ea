// sm90_vectors: rows in the order of epilogue-tiled GEMMs, and their scales (spec 8.7).
//
// Rows: a thread moves one vector of 16, 4 or 1 bytes, the widest that row, strides and addresses
// allow; neighbouring threads write neighbours of an output row, which gathers from the input.
// Scales: a thread moves a word, the four neighbouring scales of a row, which are adjacent in both
// layouts; neighbouring threads write neighbouring words. All batches have whole tiles of 128 rows,
// so they are one tensor to the kernel.
//
// Bytes: input and output, once. Threads of one launch are numbered in 32 bits, rows in 64.
#include <algorithm>
#include <cuda_runtime.h>

#include "base/fast_division.h"
#include "base/int_math.h"
#include "device/ptx/grid_dependency.cuh"
#include "device/vector_io.cuh"
#include "ops/shuffle/shuffle_problem.h"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/launch.h"

namespace narrowfloat {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxThreadsPerLaunch = INT32_MAX - kThreads;
constexpr int64_t kTileRows = 128;
constexpr int64_t kWordScales = 4;

struct ShuffleParams {
  const uint8_t* input = nullptr;
  uint8_t* output = nullptr;
  int64_t input_row_bytes = 0;
  int64_t row_bytes = 0;
  int64_t first_row = 0;  // First row of this launch.
  int64_t group_rows = 0;
  FastDivisor units_per_row;  // Vectors, or words of scales.
  uint32_t num_threads = 0;
  bool is_inverse = false;
};

template <typename Vector>
__global__ void __launch_bounds__(kThreads)
    move_rows_kernel(const __grid_constant__ ShuffleParams params) {
  const uint32_t thread = blockIdx.x * kThreads + threadIdx.x;
  if (thread >= params.num_threads) return;
  const uint32_t row_of_launch = params.units_per_row.quotient(thread);
  const int64_t byte =
      int64_t{thread - row_of_launch * params.units_per_row.divisor()} * int64_t{sizeof(Vector)};
  const int64_t row = params.first_row + row_of_launch;
  const int64_t source =
      params.is_inverse ? shuffled_row(row, params.group_rows) : plain_row(row, params.group_rows);
  wait_for_previous_grids();
  const auto vector = load_readonly<Vector>(params.input + source * params.input_row_bytes + byte);
  trigger_dependent_launch();
  store(params.output + row * params.row_bytes + byte, vector);
}

// A word of the swizzled scales and the place of its scales in the linear ones.
struct Cell {
  int64_t plain;       // Position of the first scale in the linear scales.
  int64_t swizzled;    // Position of the word in the swizzled scales.
  int64_t num_scales;  // Up to 4; the others are padding.
};

// `thread` counts words of the output.
__device__ Cell find_cell(const ShuffleParams& params, uint32_t thread) {
  constexpr uint32_t kWordsPerTile = kTileRows;
  const uint32_t words = params.units_per_row.divisor();
  const uint32_t tile_or_row =
      params.units_per_row.quotient(params.is_inverse ? thread : thread / kWordsPerTile);
  int64_t row = params.first_row;
  uint32_t word = 0;
  if (params.is_inverse) {
    row += tile_or_row;
    word = thread - tile_or_row * words;
  } else {
    const uint32_t in_tile = thread % kWordsPerTile;
    const uint32_t place = in_tile % 4 * 32 + in_tile / 4;
    word = thread / kWordsPerTile - tile_or_row * words;
    row = plain_row(row + int64_t{tile_or_row} * kTileRows + place, params.group_rows);
  }
  const int64_t shuffled = shuffled_row(row, params.group_rows);
  const int64_t in_tile = shuffled % kTileRows;
  const int64_t tile = shuffled / kTileRows * words + word;
  const int64_t left = params.row_bytes - word * kWordScales;
  return {.plain = row * params.row_bytes + word * kWordScales,
          .swizzled = tile * (kTileRows * kWordScales) + in_tile % 32 * 16 + in_tile / 32 * 4,
          .num_scales = left < kWordScales ? left : kWordScales};
}

__global__ void __launch_bounds__(kThreads)
    move_scales_kernel(const __grid_constant__ ShuffleParams params) {
  const uint32_t thread = blockIdx.x * kThreads + threadIdx.x;
  if (thread >= params.num_threads) return;
  const Cell cell = find_cell(params, thread);
  const bool has_words = params.row_bytes % kWordScales == 0;
  wait_for_previous_grids();
  uint32_t word = 0;
  if (params.is_inverse) {
    word = load_readonly<uint32_t>(params.input + cell.swizzled);
  } else if (has_words) {
    word = load_readonly<uint32_t>(params.input + cell.plain);
  } else {
#pragma unroll
    for (int i = 0; i < kWordScales; ++i) {
      if (i >= cell.num_scales) continue;
      word |= uint32_t{load_readonly<uint8_t>(params.input + cell.plain + i)} << (8 * i);
    }
  }
  trigger_dependent_launch();
  if (!params.is_inverse) {
    store(params.output + cell.swizzled, word);
  } else if (has_words) {
    store(params.output + cell.plain, word);
  } else {
#pragma unroll
    for (int i = 0; i < kWordScales; ++i) {
      if (i < cell.num_scales)
        params.output[cell.plain + i] = static_cast<uint8_t>(word >> (8 * i));
    }
  }
}

// The widest vector that divides the row, the strides and the addresses.
int64_t vector_bytes(const ShuffleProblem& problem, const ShuffleArgs& args) {
  const auto all =
      static_cast<uint64_t>(problem.row_bytes) | static_cast<uint64_t>(args.input_row_bytes) |
      reinterpret_cast<uintptr_t>(args.input) | reinterpret_cast<uintptr_t>(args.output);
  return all % 16 == 0 ? 16 : all % 4 == 0 ? 4 : 1;
}

using Kernel = void (*)(ShuffleParams);

// Launches slices of whole tiles of rows, as 32 bits number the threads of a launch.
void launch_in_pieces(Kernel kernel, int64_t rows, int64_t units_per_row, ShuffleParams params,
                      Stream stream) {
  params.units_per_row = FastDivisor(static_cast<uint32_t>(units_per_row));
  const int64_t rows_per_launch = kMaxThreadsPerLaunch / units_per_row / kTileRows * kTileRows;
  for (int64_t first = 0; first < rows; first += rows_per_launch) {
    const int64_t threads = std::min(rows - first, rows_per_launch) * units_per_row;
    params.first_row = first;
    params.num_threads = static_cast<uint32_t>(threads);
    const auto blocks = static_cast<unsigned>(ceil_div(threads, kThreads));
    launch(kernel, {dim3(blocks), dim3(kThreads)}, stream, params);
  }
}

void launch_shuffle(const ShuffleProblem& problem, const ShuffleArgs& args, Stream stream) {
  if (problem.rows == 0 || problem.row_bytes == 0) return;
  const CudaDeviceScope scope(problem.device);
  const ShuffleParams params{.input = static_cast<const uint8_t*>(args.input),
                             .output = static_cast<uint8_t*>(args.output),
                             .input_row_bytes = args.input_row_bytes,
                             .row_bytes = problem.row_bytes,
                             .group_rows = problem.group_rows,
                             .is_inverse = problem.is_inverse};
  if (problem.is_scales) {
    const int64_t words = ceil_div(problem.row_bytes, kWordScales);
    return launch_in_pieces(move_scales_kernel, problem.rows, words, params, stream);
  }
  const int64_t width = vector_bytes(problem, args);
  const Kernel kernel = width == 16  ? move_rows_kernel<uint4>
                        : width == 4 ? move_rows_kernel<uint32_t>
                                     : move_rows_kernel<uint8_t>;
  launch_in_pieces(kernel, problem.rows, problem.row_bytes / width, params, stream);
}

Support supports(const ShuffleProblem& problem) {
  if (problem.row_bytes > kMaxThreadsPerLaunch / kTileRows) {
    return Support::no("rows beyond 2^24 bytes");
  }
  return Support::yes();
}

}  // namespace

const ShuffleImpl kShuffleSm90{"sm90_vectors", on_own_code<supports>, launch_shuffle};
const ShuffleImpl kShuffleSm80{"sm80_vectors", on_portable_code<supports>, launch_shuffle};

}  // namespace narrowfloat
