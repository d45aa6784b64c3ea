// Combine: tells the other ranks that their results are complete, then sums, for each token of this
// rank, the rows that the others have computed, in their memory or in this rank's.
//
// Loads of the others' rows are relaxed at system scope: they come after the flags, and do not
// read the L1 cache, which may hold an earlier call's row.
#include <algorithm>

#include "base/int_math.h"
#include "device/elements.cuh"
#include "device/output_elements.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/reduce.cuh"
#include "ops/expert_exchange/expert_exchange_sm90.h"
#include "ops/expert_exchange/sm90/exchange_cta.cuh"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/launch.h"

namespace narrowfloat {
namespace {

constexpr int kCopyThreads = 128;
constexpr int kSumThreads = 256;
constexpr int64_t kPieceBytes = 16;

__global__ void __launch_bounds__(kCopyThreads)
    store_slots_kernel(const __grid_constant__ StoreSlots args) {
  wait_for_previous_grids();
  const int64_t pieces = args.row_bytes / kPieceBytes;
  for (int64_t slot = blockIdx.x; slot < args.slots; slot += gridDim.x) {
    const int32_t row = args.slot_to_row[slot];
    if (row < 0) continue;
    const uint8_t* const from = args.rows + row * args.row_bytes;
    uint8_t* const to = args.target + slot * args.row_bytes;
    for (int64_t i = threadIdx.x; i < pieces; i += kCopyThreads) {
      store(to + i * kPieceBytes, load_readonly<uint4>(from + i * kPieceBytes));
    }
  }
}

// The results were stored by earlier grids of this stream.
__global__ void send_results_kernel(int64_t flags_offset, const __grid_constant__ ExchangePlan plan,
                                    const __grid_constant__ RankMemory memory) {
  wait_for_previous_grids();
  const int peer = static_cast<int>(threadIdx.x);
  if (peer >= memory.ranks) return;
  store_release(flag_of(memory, flags_offset, peer, memory.rank), *plan.call);
}

// Rows of a token whose loads are in flight at once.
constexpr int kRowsInFlight = 4;

template <class Elements>
__device__ Elements load_returned(const void* address) {
  const uint4 words = load_relaxed_16(address);
  Elements elements;
  elements.words[0] = words.x;
  elements.words[1] = words.y;
  elements.words[2] = words.z;
  elements.words[3] = words.w;
  return elements;
}

// Adds up to kRowsInFlight rows of a token, from slot `first` on.
template <class Elements>
__device__ void add_rows(const SumResults& args, const ExchangePlan& plan, int64_t token,
                         int32_t first, int64_t piece, float (&sums)[Elements::kSize]) {
  ReturnedRow rows[kRowsInFlight];
  float weights[kRowsInFlight];
  Elements data[kRowsInFlight];
#pragma unroll
  for (int i = 0; i < kRowsInFlight; ++i) {
    rows[i] = {};
    weights[i] = 1.0F;
    if (first + i >= args.slots) continue;
    const int64_t slot = token * args.slots + first + i;
    rows[i] = plan.returned[slot];
    if (args.has_weights) weights[i] = plan.weights[slot];
  }
#pragma unroll
  for (int i = 0; i < kRowsInFlight; ++i) {
    if (rows[i].row < 0) continue;
    data[i] = load_returned<Elements>(args.results.at[rows[i].rank] + rows[i].row * args.row_bytes +
                                      piece * kPieceBytes);
  }
#pragma unroll
  for (int i = 0; i < kRowsInFlight; ++i) {
    if (rows[i].row < 0) continue;
#pragma unroll
    for (int j = 0; j < Elements::kSize; ++j) sums[j] = fma_rn(weights[i], data[i][j], sums[j]);
  }
}

template <class Output, int kCols>
__device__ void store_sums(const SumResults& args, int64_t token, int64_t piece,
                           const float (&sums)[kCols]) {
  const int64_t col = piece * kCols;
  uint8_t* const out = args.out + token * args.out_row_bytes + col * Output::kBytes;
  if (col + kCols <= args.cols) return Output::store_all(sums, out);
#pragma unroll
  for (int i = 0; i < kCols; ++i) {
    if (col + i < args.cols) Output::store_one(sums[i], out + i * Output::kBytes);
  }
}

template <class Elements, class Output>
__global__ void __launch_bounds__(kSumThreads)
    sum_results_kernel(const __grid_constant__ SumResults args,
                       const __grid_constant__ ExchangePlan plan,
                       const __grid_constant__ RankMemory memory) {
  const int thread = static_cast<int>(threadIdx.x);
  wait_for_previous_grids();
  bool is_missing = false;
  if (blockIdx.x == 0 && thread == 0) tell_end_of_exchange(args.end_of_exchange);
  if (args.flags_offset != kNoFlags && thread < memory.ranks) {
    is_missing = !wait_for_flag(memory, args.flags_offset, thread, *plan.call, Awaited::kResults);
  }
  if (__syncthreads_or(is_missing ? 1 : 0) != 0) return;
  const int64_t pieces = ceil_div(args.cols, int64_t{Elements::kSize});
  const int64_t step = int64_t{gridDim.x} * kSumThreads;
  const int64_t end = args.tokens * pieces;
  for (int64_t i = int64_t{blockIdx.x} * kSumThreads + thread; i < end; i += step) {
    const int64_t token = i / pieces;
    const int64_t piece = i - token * pieces;
    float sums[Elements::kSize] = {};
    for (int32_t first = 0; first < args.slots; first += kRowsInFlight) {
      add_rows<Elements>(args, plan, token, first, piece, sums);
    }
    store_sums<Output>(args, token, piece, sums);
  }
}

__global__ void abort_exchange_kernel(const __grid_constant__ ExchangePlan plan,
                                      const __grid_constant__ RankMemory memory) {
  wait_for_previous_grids();
  ExchangeCta cta;
  abort_call(cta, memory,
             WaitFor{AllReduceFault::kAborted, static_cast<uint32_t>(memory.rank),
                     fault_number(*plan.call, Awaited::kTokens)});
}

template <class Elements, class Output>
void launch_sum(const SumResults& args, const ExchangePlan& plan, const RankMemory& memory,
                Device device, Stream stream) {
  constexpr int64_t kCtasPerSm = 8;
  const int64_t most = cuda_device(device.index).num_sms * kCtasPerSm;
  const int64_t pieces = args.tokens * ceil_div(args.cols, int64_t{Elements::kSize});
  const int64_t ctas = std::clamp<int64_t>(ceil_div(pieces, kSumThreads), 1, most);
  launch(sum_results_kernel<Elements, Output>,
         {dim3(static_cast<unsigned>(ctas)), dim3(kSumThreads)}, stream, args, plan, memory);
}

template <class Elements>
void launch_for_output(const SumResults& args, const ExchangePlan& plan, const RankMemory& memory,
                       Device device, Stream stream) {
  if (args.out_dtype == DType::kF32) {
    launch_sum<Elements, FloatOutput>(args, plan, memory, device, stream);
  } else if (args.out_dtype == DType::kBF16) {
    launch_sum<Elements, HalfOutput<PackedBf16>>(args, plan, memory, device, stream);
  } else {
    launch_sum<Elements, HalfOutput<PackedF16>>(args, plan, memory, device, stream);
  }
}

}  // namespace

void store_slots(const StoreSlots& args, Device device, Stream stream) {
  const CudaDeviceScope scope(device);
  constexpr int64_t kMostCtas = 2048;
  launch(store_slots_kernel,
         {dim3(static_cast<unsigned>(std::min(args.slots, kMostCtas))), dim3(kCopyThreads)}, stream,
         args);
}

void send_results(int64_t flags_offset, const ExchangePlan& plan, const RankMemory& memory,
                  Device device, Stream stream) {
  const CudaDeviceScope scope(device);
  launch(send_results_kernel, {dim3(1), dim3(kWarpSize)}, stream, flags_offset, plan, memory);
}

void sum_results(const SumResults& args, const ExchangePlan& plan, const RankMemory& memory,
                 Device device, Stream stream) {
  const CudaDeviceScope scope(device);
  if (args.result_dtype == DType::kF32) {
    launch_for_output<FloatElements<4>>(args, plan, memory, device, stream);
  } else if (args.result_dtype == DType::kBF16) {
    launch_for_output<PackedElements<PackedBf16, 8>>(args, plan, memory, device, stream);
  } else {
    launch_for_output<PackedElements<PackedF16, 8>>(args, plan, memory, device, stream);
  }
}

void abort_exchange(const ExchangePlan& plan, const RankMemory& memory, Device device,
                    Stream stream) {
  const CudaDeviceScope scope(device);
  launch(abort_exchange_kernel, {dim3(1), dim3(1)}, stream, plan, memory);
}

}  // namespace narrowfloat
