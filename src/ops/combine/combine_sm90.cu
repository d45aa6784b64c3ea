// sm90_pieces: the weighted sum of a token's slots in slot order (moe spec 6.6). It is bound by
// reads.
//
//   a = +0;  for s ascending, row(t, s) >= 0:  a = fma(w[t, s], y[row(t, s), o], a)
//   out[t, o] = round(a)
//
// A thread computes one 16-byte vector of a token's columns: 8 of a 16-bit type or 4 of fp32. A CTA
// has up to 256 neighbouring vectors of one token. The rows of eight slots are looked up at once,
// then their eight vectors are in flight at once: two memory latencies for up to eight slots, the
// first of which a layer has while the previous kernel runs.
//
// Bytes per token: slots * cols * width read, cols * width written. Instructions per element: one
// fma per slot, and the widening. Rows end at multiples of 16 bytes, so that only stores have a
// remainder.
#include <algorithm>
#include <cuda_runtime.h>
#include <string>

#include "base/fast_division.h"
#include "base/int_math.h"
#include "device/elements.cuh"
#include "device/output_elements.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "formats/float16.h"
#include "ops/combine/combine_problem.h"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/launch.h"

namespace narrowfloat {
namespace {

constexpr int kMaxThreads = 256;
constexpr int64_t kPieceBytes = 16;
// Slots whose loads are in flight at once. For small numbers of slots fewer registers allow more
// threads.
constexpr int kMaxSlotsInFlight = 8;
constexpr int kMinSlotsInFlight = 2;

enum class WeightType : uint8_t { kOne, kF32, kBf16 };

struct CombineParams {
  const uint8_t* slot_rows = nullptr;    // [rows], row_bytes apart.
  const int32_t* slot_to_row = nullptr;  // [tokens, slots]
  const void* weights = nullptr;         // [tokens, slots]
  uint8_t* output = nullptr;             // [tokens, cols], output_row_bytes apart.
  int64_t row_bytes = 0;
  int64_t output_row_bytes = 0;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t slots = 0;
  FastDivisor blocks_per_token;
  WeightType weight_type = WeightType::kOne;
  bool maps_are_complete = false;
};

// 16 bytes of input, and as many columns of output.
template <class HalfType>
using HalfPiece = PackedElements<HalfType, 8>;
using FloatPiece = FloatElements<4>;

struct Piece {
  int64_t token;
  int64_t col;
};

template <int kCols>
__device__ Piece assign_piece(const CombineParams& params) {
  const uint32_t token = params.blocks_per_token.quotient(blockIdx.x);
  const uint32_t block = blockIdx.x - token * params.blocks_per_token.divisor();
  return {.token = token, .col = (int64_t{block} * blockDim.x + threadIdx.x) * kCols};
}

// The rows, weights and data of neighbouring slots of a token.
template <class Elements, int kSlots>
struct SlotPieces {
  int32_t row[kSlots];
  float weight[kSlots];
  Elements data[kSlots];
};

// Loads the weights of slots [slot, slot + num_slots). L1 may have older ones of a previous layer.
template <int kSlots>
__device__ void load_weights(const CombineParams& params, int64_t slot, int64_t num_slots,
                             float (&weights)[kSlots]) {
  const auto* const floats = static_cast<const float*>(params.weights) + slot;
  const auto* const halves = static_cast<const uint16_t*>(params.weights) + slot;
  const bool is_f32 = params.weight_type == WeightType::kF32;
  const bool is_bf16 = params.weight_type == WeightType::kBf16;
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    weights[i] = 1.0F;
    if (is_f32 && i < num_slots) weights[i] = __ldcg(floats + i);
  }
  if (!is_bf16) return;
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    if (i < num_slots) weights[i] = bf16_to_float(__ldcg(halves + i));
  }
}

template <class Elements, int kSlots>
__device__ void load_maps(const CombineParams& params, const Piece& piece, int64_t first,
                          SlotPieces<Elements, kSlots>& slots) {
  const int64_t slot = piece.token * params.slots + first;
  const int64_t num_slots = params.slots - first;
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    slots.row[i] = i < num_slots ? __ldcg(params.slot_to_row + slot + i) : -1;
  }
  load_weights(params, slot, num_slots, slots.weight);
}

// Loads nothing for a slot without a row, or with one that does not exist.
template <class Elements, int kSlots>
__device__ void load_data(const CombineParams& params, const Piece& piece,
                          SlotPieces<Elements, kSlots>& slots) {
  constexpr int64_t kElementBytes = kPieceBytes / Elements::kSize;
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    if (slots.row[i] >= params.rows) slots.row[i] = -1;
    if (slots.row[i] < 0) continue;
    slots.data[i] = load_elements<Elements>(params.slot_rows + slots.row[i] * params.row_bytes +
                                            piece.col * kElementBytes);
  }
}

template <class Elements, int kSlots>
__device__ void add_slots(const SlotPieces<Elements, kSlots>& slots,
                          float (&sums)[Elements::kSize]) {
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    if (slots.row[s] < 0) continue;
#pragma unroll
    for (int i = 0; i < Elements::kSize; ++i) {
      sums[i] = fma_rn(slots.weight[s], slots.data[s][i], sums[i]);
    }
  }
}

template <class Output, int kCols>
__device__ void store_piece(const CombineParams& params, const Piece& piece,
                            const float (&sums)[kCols]) {
  uint8_t* const global_piece =
      params.output + piece.token * params.output_row_bytes + piece.col * Output::kBytes;
  if (piece.col + kCols <= params.cols) {
    Output::store_all(sums, global_piece);
    return;
  }
#pragma unroll
  for (int i = 0; i < kCols; ++i) {
    if (piece.col + i < params.cols) Output::store_one(sums[i], global_piece + i * Output::kBytes);
  }
}

template <class Elements, class Output, int kSlots>
__global__ void __launch_bounds__(kMaxThreads)
    combine_slots_kernel(const __grid_constant__ CombineParams params) {
  const Piece piece = assign_piece<Elements::kSize>(params);
  // The next kernel's work before its own wait then overlaps with this kernel.
  trigger_dependent_launch_before_wait();
  if (piece.col >= params.cols) return;
  float sums[Elements::kSize] = {};
  SlotPieces<Elements, kSlots> slots;
  if (params.maps_are_complete) load_maps(params, piece, 0, slots);
  wait_for_previous_grids();
  for (int64_t first = 0; first < params.slots; first += kSlots) {
    if (first > 0 || !params.maps_are_complete) load_maps(params, piece, first, slots);
    load_data(params, piece, slots);
    add_slots(slots, sums);
  }
  store_piece<Output>(params, piece, sums);
}

WeightType weight_type(const CombineProblem& problem) {
  if (!problem.has_weights) return WeightType::kOne;
  return problem.weights == DType::kF32 ? WeightType::kF32 : WeightType::kBf16;
}

int64_t element_width(DType dtype) { return bits(dtype) / 8; }

int64_t pieces_per_token(const CombineProblem& problem) {
  return ceil_div(problem.cols * element_width(problem.slot_rows), kPieceBytes);
}

int64_t blocks_per_token(const CombineProblem& problem) {
  return ceil_div(pieces_per_token(problem), kMaxThreads);
}

template <class Elements, class Output>
void launch_for_slots(const LaunchShape& shape, const CombineParams& params, Stream stream) {
  if (params.slots <= kMinSlotsInFlight) {
    launch(combine_slots_kernel<Elements, Output, kMinSlotsInFlight>, shape, stream, params);
  } else {
    launch(combine_slots_kernel<Elements, Output, kMaxSlotsInFlight>, shape, stream, params);
  }
}

template <class Elements>
void launch_for_output(const CombineProblem& problem, const LaunchShape& shape,
                       const CombineParams& params, Stream stream) {
  if (problem.output == DType::kF32) {
    launch_for_slots<Elements, FloatOutput>(shape, params, stream);
  } else if (problem.output == DType::kBF16) {
    launch_for_slots<Elements, HalfOutput<PackedBf16>>(shape, params, stream);
  } else {
    launch_for_slots<Elements, HalfOutput<PackedF16>>(shape, params, stream);
  }
}

void launch_combine_slots(const CombineProblem& problem, const CombineArgs& args, Stream stream) {
  if (problem.tokens == 0 || problem.cols == 0) return;
  const CudaDeviceScope scope(problem.device);
  const int64_t blocks = blocks_per_token(problem);
  const int64_t threads = round_up(ceil_div(pieces_per_token(problem), blocks), 32);
  CombineParams params;
  params.slot_rows = static_cast<const uint8_t*>(args.slot_rows);
  params.slot_to_row = args.slot_to_row;
  params.weights = args.weights;
  params.output = static_cast<uint8_t*>(args.output);
  params.row_bytes = problem.hidden * element_width(problem.slot_rows);
  params.output_row_bytes = args.output_stride * element_width(problem.output);
  params.rows = problem.rows;
  params.cols = problem.cols;
  params.slots = problem.slots;
  params.blocks_per_token = FastDivisor(static_cast<uint32_t>(blocks));
  params.weight_type = weight_type(problem);
  params.maps_are_complete = args.maps_are_complete;
  const LaunchShape shape{dim3(static_cast<unsigned>(problem.tokens * blocks)),
                          dim3(static_cast<unsigned>(threads))};
  if (problem.slot_rows == DType::kF32) {
    launch_for_output<FloatPiece>(problem, shape, params, stream);
  } else if (problem.slot_rows == DType::kBF16) {
    launch_for_output<HalfPiece<PackedBf16>>(problem, shape, params, stream);
  } else {
    launch_for_output<HalfPiece<PackedF16>>(problem, shape, params, stream);
  }
}

Support supports(const CombineProblem& problem) {
  if (problem.tokens > INT32_MAX / std::max<int64_t>(1, blocks_per_token(problem))) {
    return Support::no("more than 2^31 chunks of " + std::to_string(kMaxThreads * kPieceBytes) +
                       " bytes");
  }
  return Support::yes();
}

}  // namespace

const CombineImpl kCombineSm90{"sm90_pieces", on_own_code<supports>, launch_combine_slots};
const CombineImpl kCombineSm80{"sm80_pieces", on_portable_code<supports>, launch_combine_slots};

}  // namespace narrowfloat
