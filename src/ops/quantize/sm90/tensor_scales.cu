// See tensor_scales.h.
//
// A maximum: every thread takes runs of 16 elements in a grid that fills the GPU a few times, keeps
// a running maximum of bit patterns, and each block of threads adds one atomic maximum. Reads the
// input once: 2 bytes an element of bf16, bound by memory. Batches are the grid's second axis.
#include <algorithm>

#include "device/ptx/grid_dependency.cuh"
#include "device/reduce.cuh"
#include "ops/quantize/sm90/scale_stores.cuh"
#include "ops/quantize/sm90/tensor_scales.h"
#include "ops/quantize/sm90/visit_sources.cuh"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/launch.h"

namespace narrowfloat {
namespace {

constexpr int kThreads = 256;
constexpr int kRun = 16;
constexpr int kBlocksPerSm = 8;

// Loads of a thread at once; a run of SiLU reads twice as much and computes.
template <class Source>
inline constexpr int kRunsInFlight = 4;
template <class Half, class Math>
inline constexpr int kRunsInFlight<SiluRows<Half, Math>> = 1;

bool is_fp8_tensor(const QuantizeProblem& problem) {
  return problem.format == FormatId::kFp8Tensor;
}

int64_t num_slots(const QuantizeProblem& problem) {
  if (is_fp8_tensor(problem) || problem.encode_axis == EncodeScaleAxis::kBatch) {
    return problem.batch;
  }
  return problem.encode_axis == EncodeScaleAxis::kRow ? problem.rows : 1;
}

// The maximum of a run, NaN not counted. E4M3 input counts as it is, before its factor.
template <class Source>
__device__ uint32_t run_maximum(const QuantizeParams& params, const uint8_t* row, int64_t col) {
  const auto maximum = [](const auto& elements) {
    const uint32_t number = elements.max_number();
    return number > kInfinityBits ? 0U : number;
  };
  if constexpr (Source::kScaleRule == ScaleRule::kE4m3Input) {
    return maximum(Source::template load_unscaled<kRun>(params, row, col, 1.0F));
  } else {
    return maximum(Source::template load<kRun>(params, row, col, 1.0F));
  }
}

struct RunInRow {
  int64_t row;
  int64_t run;
};
__device__ inline RunInRow run_in_row(int64_t run, int64_t runs_per_row) {
  const int64_t row = run / runs_per_row;
  return {row, run - row * runs_per_row};
}
__device__ inline void advance(RunInRow& place, const RunInRow& stride, int64_t runs_per_row) {
  place.row += stride.row;
  place.run += stride.run;
  if (place.run >= runs_per_row) {
    place.run -= runs_per_row;
    ++place.row;
  }
}

// blockIdx.y: batch.
template <BlockFormat Format, class Source>
__global__ void __launch_bounds__(kThreads)
    find_amax_kernel(const __grid_constant__ QuantizeParams params, const int64_t runs_per_row) {
  __shared__ uint32_t shared_maxima[kThreads / kWarpSize];
  wait_for_previous_grids();
  const uint32_t batch = blockIdx.y;
  const int64_t runs = valid_rows(params, batch) * runs_per_row;
  const uint8_t* input = params.input + batch * params.input_batch_stride;
  uint32_t largest = 0;
  // Runs of a thread are a grid apart, so that a warp reads neighbouring memory. Places are counted
  // on: a 64-bit division for every run would take longer than its load.
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const RunInRow stride = run_in_row(step, runs_per_row);
  RunInRow place = run_in_row(first, runs_per_row);
  for (int64_t run = first; run < runs; run += kRunsInFlight<Source> * step) {
#pragma unroll
    for (int i = 0; i < kRunsInFlight<Source>; ++i) {
      // Behind the last run the first once more: loads without conditions go out together.
      const RunInRow at = run + i * step < runs ? place : RunInRow{0, 0};
      const uint8_t* row = input + at.row * params.input_row_stride;
      largest = max(largest, run_maximum<Source>(params, row, at.run * kRun));
      advance(place, stride, runs_per_row);
    }
  }
  allow_next_grid();
  largest = block_max(largest, shared_maxima);
  if (threadIdx.x == 0 && largest > 0) {
    atomicMax(reinterpret_cast<unsigned*>(amax_slot<Format>(params, batch)), largest);
  }
}

template <BlockFormat Format, class Math>
__global__ void __launch_bounds__(kThreads)
    store_tensor_scales_kernel(const __grid_constant__ QuantizeParams params, const int64_t count) {
  wait_for_previous_grids();
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= count) return;
  const auto slot = static_cast<uint32_t>(index);
  if constexpr (Format::kId == FormatId::kFp8Tensor) {
    const float stored = tensor_scale<Math>(params, slot).stored;
    for (const ScaleImages* images : {&params.scales, &params.extra_scales}) {
      // The one layout of one scale is linear.
      auto* scales = reinterpret_cast<float*>(images->data);
      if (scales != nullptr) scales[index] = canonical_nan(stored);
    }
  } else {
    const float encode = encode_scale<Format>(params, slot, index);
    params.global_scale[index] = canonical_nan(div_rn(1.0F, encode));
  }
}

// The slots differ between the two kinds, not between formats.
template <typename Visitor>
void visit_slot_format(const QuantizeProblem& problem, Visitor&& visitor) {
  if (is_fp8_tensor(problem)) return visitor.template operator()<Fp8Tensor>();
  visitor.template operator()<Nvfp4>();
}

}  // namespace

bool needs_amax(const QuantizeProblem& problem) {
  if (is_fp8_tensor(problem)) return !problem.has_fp8_decode_scale;
  return problem.encode_source == EncodeScaleSource::kAmax;
}

void clear_amax_slots(const QuantizeProblem& problem, const QuantizeParams& params, Stream stream) {
  void* slots = is_fp8_tensor(problem) ? static_cast<void*>(params.scales.data)
                                       : static_cast<void*>(params.global_scale);
  clear_async(slots, static_cast<size_t>(num_slots(problem)) * sizeof(float), stream);
}

void launch_find_amax(const QuantizeProblem& problem, const QuantizeParams& params, Stream stream) {
  const int64_t runs_per_row = problem.cols / kRun;
  const int64_t runs = problem.rows * runs_per_row;
  if (runs == 0) return;
  const int64_t most = int64_t{kBlocksPerSm} * cuda_device(problem.device.index).num_sms;
  const int64_t wanted = ceil_div(runs, kThreads);
  const dim3 blocks(static_cast<unsigned>(std::min(wanted, most)),
                    static_cast<unsigned>(problem.batch));
  visit_slot_format(problem, [&]<BlockFormat Format>() {
    visit_source<Format::kId == FormatId::kNvfp4>(problem, [&]<class Source>() {
      launch(find_amax_kernel<Format, Source>, {blocks, dim3(kThreads)}, stream, params,
             runs_per_row);
    });
  });
}

void launch_store_tensor_scales(const QuantizeProblem& problem, const QuantizeParams& params,
                                Stream stream) {
  const bool has_scales = is_fp8_tensor(problem) || params.global_scale != nullptr;
  const int64_t count = has_scales ? num_slots(problem) : 0;
  const dim3 blocks(static_cast<unsigned>(ceil_div(count, kThreads)));
  visit_slot_format(problem, [&]<BlockFormat Format>() {
    visit_device_math(effective_math(problem), [&]<class Math>() {
      launch(store_tensor_scales_kernel<Format, Math>, {blocks, dim3(kThreads)}, stream, params,
             count);
    });
  });
}

}  // namespace narrowfloat
