// The first kernel of a norm's quantization that needs more of a tensor than a row: a maximum over
// all rows (computed scales), or the statistics of 128 rows (128x128 blocks).
//
// One pass as in quantize_rows.cuh, one CTA per row: adds the input into the residual, stores
// norm_output, and leaves the maximum of the norm or each row's 1 / rms. The second kernel computes
// the norm of the residual again; its bits are the same.
#include <algorithm>

#include "device/ptx/grid_dependency.cuh"
#include "ops/quantize/sm90/launch_rows.cuh"
#include "ops/quantize/sm90/quantize_rows.h"

namespace narrowfloat {
namespace {

template <class Source, class Tuning>
__global__ void __maxnreg__(Tuning::kConfig.registers)
    prepare_norm_rows_kernel(const __grid_constant__ QuantizeParams params,
                             const __grid_constant__ QuantizeRowsGrid grid,
                             const NormRowsResult result) {
  __shared__ RowStorage<true> shared_storage;
  constexpr int kRuns = Tuning::kConfig.runs;
  wait_for_previous_grids();
  const RowPlace place = place_of_row(params, grid);
  auto chunk = load_chunk<Source, kRuns>(params, place, 0, true);
  trigger_dependent_launch();
  const float factor =
      row_reciprocal_rms<Source, kRuns>(params, place, chunk, grid.num_chunks, shared_storage.sums);
  uint32_t largest = 0;
#pragma unroll 1
  for (int index = 0;;) {
    finish_chunk(params, index, factor, chunk);
    largest = max(largest, chunk_maximum(chunk));
    store_norm_output(params, place, index, chunk);
    if (++index == grid.num_chunks) break;
    chunk = load_chunk<Source, kRuns>(params, place, index, false);
  }
  if (result.amax_slots != nullptr) {
    largest = block_max(largest, shared_storage.maxima);
    if (threadIdx.x == 0 && largest > 0) {
      float* slot = result.amax_slots + place.batch * result.slots_per_batch;
      atomicMax(reinterpret_cast<unsigned*>(slot), largest);
    }
  }
  if (result.stores_reciprocal_rms) {
    uint8_t* values = params.values + int64_t{place.flat_row} * params.value_row_bytes;
    for (uint32_t col = threadIdx.x * kTileCols; col < params.cols; col += blockDim.x * kTileCols) {
      store(values + col, factor);
    }
  }
}

}  // namespace

void launch_prepare_norm_rows(const QuantizeProblem& problem, const QuantizeParams& params,
                              const NormRowsResult& result, Stream stream) {
  const RowShape shape = row_shape(problem.cols, LongRows::kConfig);
  const int64_t rows = problem.batch * problem.rows;
  for (int64_t first = 0; first < rows; first += kMaxLaunchRows) {
    const auto num_rows = static_cast<uint32_t>(std::min(kMaxLaunchRows, rows - first));
    const QuantizeRowsGrid grid{
        .first_row = first, .num_rows = num_rows, .num_chunks = shape.num_chunks};
    visit_half(problem.input, [&]<class Half>() {
      launch(prepare_norm_rows_kernel<NormRows<Half>, LongRows>,
             {dim3(num_rows), dim3(static_cast<unsigned>(shape.threads))}, stream, params, grid,
             result);
    });
  }
}

QuantizeParams after_prepare_norm_rows(const QuantizeParams& params) {
  QuantizeParams rest = params;
  rest.norm_output = nullptr;
  if (params.residual != nullptr) {
    rest.input = params.residual;
    rest.input_row_stride = params.residual_row_stride;
    rest.input_batch_stride = params.rows * params.residual_row_stride;
    rest.residual = nullptr;
  }
  return rest;
}

Support norm_extents(const QuantizeProblem& problem) {
  // Threads cover the padding of values too, and each needs a slot for its sum in shared memory.
  if (problem.value_cols > kMaxNormCols) {
    return Support::no("norms take up to 524288 columns, padding included");
  }
  if (problem.rows + 31 * problem.groups > (int64_t{1} << 31) - 1) {
    return Support::no("rows of scales must be below 2^31");
  }
  return Support::yes();
}

}  // namespace narrowfloat
