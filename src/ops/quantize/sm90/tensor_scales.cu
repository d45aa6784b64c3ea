// See tensor_scales.h.
//
// A maximum: every thread loads runs of 16 elements in a grid that fills the GPU a few times, keeps
// a running maximum of bit patterns, and each CTA adds one atomic maximum. Reads the input once: 2
// bytes per element of bf16, bound by memory. Batches are the grid's second axis.
#include <algorithm>

#include "device/ptx/grid_dependency.cuh"
#include "device/reduce.cuh"
#include "ops/quantize/sm90/any_rows.cuh"
#include "ops/quantize/sm90/scale_stores.cuh"
#include "ops/quantize/sm90/tensor_scales.h"
#include "ops/quantize/sm90/visit_sources.cuh"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/launch.h"

namespace narrowfloat {
namespace {

constexpr int kThreads = 256;
constexpr int kRun = 16;

// The operands of maxima: bf16 unchanged, or any source. kRunsInFlight: loads of a thread at once.
struct AmaxOfBf16 {
  static constexpr int kRunsInFlight = 4;
  __device__ static auto load(const QuantizeParams& params, const uint8_t* row, int64_t col) {
    return PlainRows<PackedBf16>::load<kRun>(params, row, col, 1.0F);
  }
};
// E4M3 input counts without its factor.
template <class Math>
struct AmaxOfAny {
  static constexpr int kRunsInFlight = 2;
  __device__ static auto load(const QuantizeParams& params, const uint8_t* row, int64_t col) {
    return AnyRows<Nvfp4, Math>::template load<kRun>(params, row, col, 1.0F);
  }
};

bool is_fp8_tensor(const QuantizeProblem& problem) {
  return problem.format == FormatId::kFp8Tensor;
}

int64_t num_slots(const QuantizeProblem& problem) {
  if (is_fp8_tensor(problem) || problem.encode_axis == EncodeScaleAxis::kBatch) {
    return problem.batch;
  }
  return problem.encode_axis == EncodeScaleAxis::kRow ? problem.rows : 1;
}

// The maximum of a run; NaN does not count.
template <class Source>
__device__ uint32_t run_maximum(const QuantizeParams& params, const uint8_t* row, int64_t col) {
  const uint32_t number = Source::load(params, row, col).max_number();
  return number > kInfinityBits ? 0U : number;
}

// The location of a run. Runs are numbered row after row; a thread's runs are a grid apart.
// Locations advance from the first one: a 64-bit division per run would take longer than its load.
struct RunInRow {
  int64_t row;
  int64_t run;
};
struct AmaxGrid {
  FastDivisor runs_per_row;
  int64_t step;      // Threads of the grid's first axis, below 2^31.
  RunInRow advance;  // The step in rows and runs.
};

__device__ inline RunInRow first_place(const AmaxGrid& grid, int64_t run) {
  const uint32_t row = grid.runs_per_row.quotient(static_cast<uint32_t>(run));
  return {row, run - int64_t{row} * grid.runs_per_row.divisor()};
}
__device__ inline void advance(const AmaxGrid& grid, RunInRow& place) {
  place.row += grid.advance.row;
  place.run += grid.advance.run;
  if (place.run >= grid.runs_per_row.divisor()) {
    place.run -= grid.runs_per_row.divisor();
    ++place.row;
  }
}

// blockIdx.y is the batch.
template <BlockFormat Format, class Source>
__global__ void __launch_bounds__(kThreads)
    find_amax_kernel(const __grid_constant__ QuantizeParams params, const AmaxGrid grid) {
  __shared__ uint32_t shared_maxima[kThreads / kWarpSize];
  wait_for_previous_grids();
  const uint32_t batch = blockIdx.y;
  const int64_t runs = valid_rows(params, batch) * grid.runs_per_row.divisor();
  const uint8_t* input = params.input + batch * params.input_batch_stride;
  uint32_t largest = 0;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  RunInRow place = first_place(grid, first);
  for (int64_t run = first; run < runs; run += Source::kRunsInFlight * grid.step) {
#pragma unroll
    for (int i = 0; i < Source::kRunsInFlight; ++i) {
      // Beyond the last run the first one is loaded again: loads without conditions are issued
      // together.
      const RunInRow at = run + i * grid.step < runs ? place : RunInRow{0, 0};
      const uint8_t* row = input + at.row * params.input_row_stride;
      largest = max(largest, run_maximum<Source>(params, row, at.run * kRun));
      advance(grid, place);
    }
  }
  trigger_dependent_launch();
  largest = block_max(largest, shared_maxima);
  if (threadIdx.x == 0 && largest > 0) {
    atomicMax(reinterpret_cast<unsigned*>(amax_slot<Format>(params, batch)), largest);
  }
}

// Replaces a memset, which programmatic launches cannot overlap.
__global__ void __launch_bounds__(kThreads) clear_slots_kernel(float* slots, const int64_t count) {
  wait_for_previous_grids();
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  trigger_dependent_launch();
  if (index < count) slots[index] = 0.0F;
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
    for (const ScaleTensors* tensors : {&params.scales, &params.extra_scales}) {
      // One scale has one layout, linear.
      auto* scales = reinterpret_cast<float*>(tensors->data);
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
  float* slots =
      is_fp8_tensor(problem) ? reinterpret_cast<float*>(params.scales.data) : params.global_scale;
  const int64_t count = num_slots(problem);
  const dim3 blocks(static_cast<unsigned>(ceil_div(count, kThreads)));
  launch(clear_slots_kernel, {blocks, dim3(kThreads)}, stream, slots, count);
}

void launch_find_amax(const QuantizeProblem& problem, const QuantizeParams& params, Stream stream) {
  const int64_t runs_per_row = problem.cols / kRun;
  const int64_t runs = problem.rows * runs_per_row;
  if (runs == 0) return;
  // One run per thread while the GPU holds them all. Beyond that a thread has as many as it loads
  // at once, in CTAs that end at different times: a last partial wave costs more than the start of
  // more CTAs.
  const int64_t num_sms = cuda_device(problem.device.index).num_sms;
  const int64_t most = std::clamp(ceil_div(runs, kThreads * 4), num_sms * 8, num_sms * 64);
  const int64_t wanted = std::min(ceil_div(runs, kThreads), most);
  const int64_t step = wanted * kThreads;
  const AmaxGrid grid{.runs_per_row = FastDivisor(static_cast<uint32_t>(runs_per_row)),
                      .step = step,
                      .advance = {step / runs_per_row, step % runs_per_row}};
  const dim3 blocks(static_cast<unsigned>(wanted), static_cast<unsigned>(problem.batch));
  visit_slot_format(problem, [&]<BlockFormat Format>() {
    if (params.row_input == RowInput::kBf16) {
      return launch(find_amax_kernel<Format, AmaxOfBf16>, {blocks, dim3(kThreads)}, stream, params,
                    grid);
    }
    visit_device_math(problem.math, [&]<class Math>() {
      launch(find_amax_kernel<Format, AmaxOfAny<Math>>, {blocks, dim3(kThreads)}, stream, params,
             grid);
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
