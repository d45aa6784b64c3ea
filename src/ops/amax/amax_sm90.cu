// sm90_pieces: the largest |x| that is a number, of a tensor or of each row (spec 4.5). It is bound
// by reads.
//
// Rows are cut into chunks of at most 32 KB (a dense tensor with one result is one row). 4 to 1024
// threads share a chunk: each has up to eight 16-byte loads in flight and takes maxima of packed
// magnitudes; then one maximum is taken over the threads. If a chunk is a whole result, its maximum
// is stored; other chunks use an atomic maximum of the bits over zeroed results, as non-negative
// floats order like integers. Any column count and any element-aligned pointer works: elements
// outside the 16-byte words of a chunk are read one by one.
//
// Bytes per element: 2 or 4 read. Instructions per element: 1 for 16-bit types (one AND, one packed
// maximum for two), 4 for fp32.
#include <algorithm>
#include <cuda_runtime.h>

#include "base/int_math.h"
#include "device/ptx/grid_dependency.cuh"
#include "device/ptx/packed.cuh"
#include "device/reduce.cuh"
#include "device/vector_io.cuh"
#include "formats/float16.h"
#include "ops/amax/amax_problem.h"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/launch.h"

namespace narrowfloat {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kWarpBlockThreads = 256;  // Threads of CTAs whose warps have their own chunks.
constexpr int64_t kVectorBytes = 16;
constexpr int64_t kPieceBytes = 32768;
// A row of up to this size is one chunk, which is cheaper than clearing the result first.
constexpr int64_t kWholeRowBytes = 65536;
constexpr int kLoadsInFlight = 4;

// The update of the maximum by a word of input, and the maximum as fp32 bits. A NaN never enters.
struct F32Words {
  static constexpr int64_t kBytes = 4;
  using Element = uint32_t;
  __device__ static uint32_t add(uint32_t largest, uint32_t word) {
    const uint32_t magnitude = word & 0x7FFFFFFFU;
    return max(largest, magnitude > 0x7F800000U ? 0U : magnitude);
  }
  __device__ static uint32_t result(uint32_t largest) { return largest; }
};

__device__ inline uint32_t larger_half(uint32_t pair) { return max(pair & 0xFFFFU, pair >> 16); }

struct F16Words {
  static constexpr int64_t kBytes = 2;
  using Element = uint16_t;
  __device__ static uint32_t add(uint32_t largest, uint32_t word) {
    return max_f16x2(largest, word & 0x7FFF7FFFU);
  }
  __device__ static uint32_t result(uint32_t largest) {
    return float_bits(f16_to_float(static_cast<uint16_t>(larger_half(largest))));
  }
};

struct Bf16Words {
  static constexpr int64_t kBytes = 2;
  using Element = uint16_t;
  __device__ static uint32_t add(uint32_t largest, uint32_t word) {
    return max_bf16x2(largest, word & 0x7FFF7FFFU);
  }
  __device__ static uint32_t result(uint32_t largest) {
    return float_bits(bf16_to_float(static_cast<uint16_t>(larger_half(largest))));
  }
};

struct AmaxParams {
  const uint8_t* input = nullptr;  // [rows][cols], rows row_bytes apart.
  float* output = nullptr;         // [rows] or [1].
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_bytes = 0;
  int64_t pieces_per_row = 0;
  int64_t piece_cols = 0;
  int threads_per_piece = 0;  // A power of two; above a warp, the whole CTA.
  bool per_row = false;
  bool stores_result = false;  // Else an atomic maximum.
};

struct Piece {
  const uint8_t* first = nullptr;
  int64_t row = 0;
  int num_elements = 0;  // 0: no chunk is left for these threads.
};

__device__ Piece assign_piece(const AmaxParams& params, int64_t element_bytes) {
  const int64_t index = int64_t{blockIdx.x} * (blockDim.x / params.threads_per_piece) +
                        threadIdx.x / params.threads_per_piece;
  Piece piece{.first = params.input};
  if (index >= params.rows * params.pieces_per_row) return piece;
  // Most problems have one row or one chunk per row and need no division.
  if (params.pieces_per_row == 1) {
    piece.row = index;
  } else if (params.rows > 1) {
    piece.row = index / params.pieces_per_row;
  }
  const int64_t col = (index - piece.row * params.pieces_per_row) * params.piece_cols;
  piece.first = params.input + piece.row * params.row_bytes + col * element_bytes;
  piece.num_elements = static_cast<int>(min(params.piece_cols, params.cols - col));
  return piece;
}

// Adds elements [begin, end) of the chunk one by one.
template <typename Words>
__device__ uint32_t add_elements(const Piece& piece, int begin, int end, const AmaxParams& params,
                                 uint32_t largest) {
  const auto* elements = reinterpret_cast<const typename Words::Element*>(piece.first);
  const int lane = static_cast<int>(threadIdx.x) & (params.threads_per_piece - 1);
  for (int i = begin + lane; i < end; i += params.threads_per_piece) {
    largest = Words::add(largest, load_readonly<typename Words::Element>(elements + i));
  }
  return largest;
}

template <typename Words>
__device__ uint32_t add_vectors(const uint8_t* first, int num_vectors, int lane, int lanes,
                                uint32_t largest) {
  const auto* vectors = reinterpret_cast<const uint4*>(first);
  for (int i = lane; i < num_vectors; i += kLoadsInFlight * lanes) {
    uint4 loaded[kLoadsInFlight];
#pragma unroll
    for (int j = 0; j < kLoadsInFlight; ++j) {
      // Loads past the end repeat the first one: a maximum may count it twice.
      loaded[j] = load_readonly<uint4>(vectors + (i + j * lanes < num_vectors ? i + j * lanes : i));
    }
#pragma unroll
    for (const uint4& words : loaded) {
      largest = Words::add(Words::add(largest, words.x), words.y);
      largest = Words::add(Words::add(largest, words.z), words.w);
    }
  }
  return largest;
}

// The maximum over the threads of a chunk; all threads of the CTA take part.
__device__ uint32_t piece_max(uint32_t value, int threads_per_piece) {
  __shared__ uint32_t shared_maxima[kMaxThreads / kWarpSize];
  if (threads_per_piece > kWarpSize) return block_max(value, shared_maxima);
  for (int distance = threads_per_piece / 2; distance > 0; distance /= 2) {
    value = max(value, __shfl_xor_sync(kFullWarp, value, distance));
  }
  return value;
}

template <typename Words>
__global__ void __launch_bounds__(kMaxThreads)
    find_maxima_kernel(const __grid_constant__ AmaxParams params) {
  constexpr int kPerVector = static_cast<int>(kVectorBytes / Words::kBytes);
  const Piece piece = assign_piece(params, Words::kBytes);
  const int lane = static_cast<int>(threadIdx.x) & (params.threads_per_piece - 1);
  const int misaligned = static_cast<int>(-reinterpret_cast<intptr_t>(piece.first) & 15);
  const int head = min(misaligned / static_cast<int>(Words::kBytes), piece.num_elements);
  const int num_vectors = (piece.num_elements - head) / kPerVector;
  wait_for_previous_grids();
  uint32_t largest = add_vectors<Words>(piece.first + head * Words::kBytes, num_vectors, lane,
                                        params.threads_per_piece, 0U);
  trigger_dependent_launch();
  largest = add_elements<Words>(piece, 0, head, params, largest);
  largest = add_elements<Words>(piece, head + num_vectors * kPerVector, piece.num_elements, params,
                                largest);
  const uint32_t maximum = piece_max(Words::result(largest), params.threads_per_piece);
  if (lane != 0 || piece.num_elements == 0) return;
  float* global_result = params.output + (params.per_row ? piece.row : 0);
  if (params.stores_result) {
    *global_result = bits_float(maximum);
  } else {
    atomicMax(reinterpret_cast<uint32_t*>(global_result), maximum);
  }
}

// The least power of two that is not below `value`, within bounds that are powers of two.
int64_t power_of_two_for(int64_t value, int64_t low, int64_t high) {
  int64_t power = low;
  while (power < value && power < high) power *= 2;
  return power;
}

AmaxParams make_params(const AmaxProblem& problem, const AmaxArgs& args) {
  const int64_t element_bytes = bits(problem.input) / 8;
  AmaxParams params;
  params.input = static_cast<const uint8_t*>(args.input);
  params.output = args.output;
  params.rows = problem.rows;
  params.cols = problem.cols;
  params.row_bytes = args.input_stride * element_bytes;
  params.per_row = problem.per_row;
  if (!problem.per_row && (args.input_stride == problem.cols || problem.rows == 1)) {
    params.cols *= params.rows;
    params.rows = 1;
  }
  const int64_t num_sms = cuda_device(problem.device.index).num_sms;
  const int64_t row_bytes = params.cols * element_bytes;
  int64_t piece_bytes = kWholeRowBytes;
  if (row_bytes > kWholeRowBytes) {
    // Makes enough chunks for four CTAs on each SM, if there is that much data.
    piece_bytes = power_of_two_for(params.rows * row_bytes / (4 * num_sms), 4096, kPieceBytes);
  }
  params.piece_cols = std::min(params.cols, piece_bytes / element_bytes);
  params.pieces_per_row = ceil_div(params.cols, params.piece_cols);
  const int64_t results = problem.per_row ? params.rows : 1;
  params.stores_result = params.rows * params.pieces_per_row == results;
  // If there are few chunks, more threads share each, which reduces latency.
  const int64_t loads = params.rows * params.pieces_per_row >= 4 * num_sms ? 8 : 2;
  const int64_t vectors = ceil_div(params.piece_cols * element_bytes, kVectorBytes);
  params.threads_per_piece =
      static_cast<int>(power_of_two_for(ceil_div(vectors, loads), 4, kMaxThreads));
  return params;
}

void launch_find_maxima(const AmaxProblem& problem, const AmaxArgs& args, Stream stream) {
  const CudaDeviceScope scope(problem.device);
  const auto results = static_cast<size_t>(problem.per_row ? problem.rows : 1);
  if (problem.rows == 0 || problem.cols == 0) {
    clear_async(args.output, results * sizeof(float), stream);
    return;
  }
  const AmaxParams params = make_params(problem, args);
  if (!params.stores_result) clear_async(args.output, results * sizeof(float), stream);
  const int threads = std::max(params.threads_per_piece,
                               params.threads_per_piece <= kWarpSize ? kWarpBlockThreads : 0);
  const int64_t blocks =
      ceil_div(params.rows * params.pieces_per_row, threads / params.threads_per_piece);
  const LaunchShape shape{dim3(static_cast<unsigned>(blocks)),
                          dim3(static_cast<unsigned>(threads))};
  if (problem.input == DType::kF32) launch(find_maxima_kernel<F32Words>, shape, stream, params);
  if (problem.input == DType::kF16) launch(find_maxima_kernel<F16Words>, shape, stream, params);
  if (problem.input == DType::kBF16) launch(find_maxima_kernel<Bf16Words>, shape, stream, params);
}

Support supports(const AmaxProblem& problem) {
  // Chunks of a warp or less come eight and more to a CTA, others are over 1 KB.
  constexpr int64_t kMaxBlocks = INT32_MAX;
  if (problem.rows > kMaxBlocks) return Support::no("more than 2^31 rows");
  return Support::yes();
}

}  // namespace

const AmaxImpl kAmaxSm90{"sm90_pieces", on_own_code<supports>, launch_find_maxima};
const AmaxImpl kAmaxSm80{"sm80_pieces", on_portable_code<supports>, launch_find_maxima};

}  // namespace narrowfloat
