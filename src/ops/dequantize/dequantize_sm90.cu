// sm90_rows: value = RN(code * factor of its block), one rounding to the output type (spec 7). It
// is bound by memory.
//
// A thread makes one 16-byte store in each of up to four rows: 8 elements of a 16-bit output, 4 of
// fp32. Neighbouring threads are neighbours in the row, so a warp's store is 512 contiguous bytes
// and its codes are 64 to 256. The four rows share all addressing: they are chosen so that their
// scales are a constant step apart (neighbours; 32 apart in swizzled_128x4, where the four scales
// are then in one sector). If one wave of threads can hold the whole tensor, each thread takes one
// row.
//
// Bytes per element: codes 0.5 or 1, scales 1/16, 1/32 or 1/32 (F32 per 128), output 2 or 4. One
// kernel serves all FP8 formats and one both NVFP4 formats; layout, axis of the global scale and
// row groups are branches that all threads take the same way. docs/kernels/dequantize.md has the
// arithmetic.
#include <algorithm>
#include <cuda_runtime.h>

#include "base/fast_division.h"
#include "device/ptx/grid_dependency.cuh"
#include "ops/dequantize/dequantize_problem.h"
#include "ops/dequantize/dequantize_steps.cuh"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/launch.h"
#include "tensor/layouts/registry.h"

namespace narrowfloat {
namespace {

constexpr int kMaxThreads = 256;
// Indices of rows, vectors and threads of one launch are 32-bit, within FastDivisor's range.
constexpr int64_t kMaxIndex = INT32_MAX;

// Threads are numbered with the vector innermost: (batch, set of rows, vector).
struct DequantizeParams {
  const uint8_t* values = nullptr;       // [batch][rows][value_row_bytes]
  const void* scales = nullptr;          // [batch][scales_per_batch]
  const float* global_scale = nullptr;   // Null: 1.
  const int64_t* row_offsets = nullptr;  // [groups + 1]; null: no groups.
  uint8_t* output = nullptr;             // [batch][rows], output_row_bytes apart.
  int64_t value_row_bytes = 0;
  int64_t output_row_bytes = 0;
  int64_t global_batch_step = 0;
  int64_t global_row_step = 0;
  int64_t groups = 0;
  int64_t scales_per_batch = 0;
  ScaleExtents scale_extents;
  ScaleLayoutId layout = ScaleLayoutId::kLinear;
  uint32_t scale_row_shift = 0;    // Shift from a row to a row of scales.
  uint32_t scale_block_shift = 0;  // Shift from a vector to a block.
  int64_t scale_step = 0;          // Scales from a thread's row to its next.
  uint32_t rows = 0;
  // Rows of a thread are 2^row_step_log2 apart: sets interleave inside tiles of rows.
  uint32_t row_step_log2 = 0;
  FastDivisor pieces_per_row;
  FastDivisor sets_per_batch;
  uint32_t first_set = 0;
  uint32_t num_threads = 0;
  bool global_scale_divides = false;
};

// Rows of a thread: one if there are few threads, else four.
struct OneRow {
  static constexpr int kRows = 1;
};
struct FourRows {
  static constexpr int kRows = 4;
};

struct RowSet {
  uint32_t batch = 0;
  uint32_t first_row = 0;
  uint32_t piece = 0;
  int num_rows = 0;  // 0: the thread has no rows.
  // The distance of the i-th row from the first, in steps. Rows past the last repeat the first, so
  // that all loads are issued together and unconditionally.
  __device__ int64_t distance(int i, int64_t step) const { return i < num_rows ? i * step : 0; }
};

template <typename Split>
__device__ RowSet assign_rows(const DequantizeParams& params) {
  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  RowSet rows;
  if (thread >= params.num_threads) return rows;
  const uint32_t set = params.pieces_per_row.quotient(thread);
  rows.piece = thread - set * params.pieces_per_row.divisor();
  const uint32_t flat_set = params.first_set + set;
  rows.batch = params.sets_per_batch.quotient(flat_set);
  const uint32_t set_of_batch = flat_set - rows.batch * params.sets_per_batch.divisor();
  const uint32_t step = 1U << params.row_step_log2;
  const uint32_t tile = set_of_batch >> params.row_step_log2;
  rows.first_row = (tile << params.row_step_log2) * Split::kRows + (set_of_batch & (step - 1));
  if (rows.first_row >= params.rows) return rows;
  const uint32_t left = (params.rows - rows.first_row + step - 1) >> params.row_step_log2;
  rows.num_rows = left < Split::kRows ? static_cast<int>(left) : Split::kRows;
  return rows;
}

// Addresses of the first row of a set.
template <typename Stored>
struct Addresses {
  const uint8_t* codes;
  const Stored* batch_scales;  // First scale of the batch.
  const Stored* scale;         // Used without row groups.
  const float* global_scale;
  uint8_t* output;
};

template <typename Piece, typename Stored>
__device__ Addresses<Stored> locate(const DequantizeParams& params, const RowSet& rows) {
  const int64_t flat_row = static_cast<int64_t>(rows.batch) * params.rows + rows.first_row;
  Addresses<Stored> addresses;
  addresses.codes =
      params.values + flat_row * params.value_row_bytes + rows.piece * int64_t{Piece::kBytes};
  addresses.batch_scales =
      static_cast<const Stored*>(params.scales) + rows.batch * params.scales_per_batch;
  addresses.scale =
      addresses.batch_scales +
      AllLayouts::offset(params.layout, rows.first_row >> params.scale_row_shift,
                         rows.piece >> params.scale_block_shift, params.scale_extents);
  addresses.global_scale = params.global_scale + rows.batch * params.global_batch_step +
                           rows.first_row * params.global_row_step;
  addresses.output =
      params.output + flat_row * params.output_row_bytes + rows.piece * int64_t{sizeof(uint4)};
  return addresses;
}

__device__ int64_t grouped_scale(const DequantizeParams& params, const RowSet& rows, int i) {
  const int64_t row = rows.first_row + rows.distance(i, int64_t{1} << params.row_step_log2);
  const int64_t scale_row =
      clamped_scale_row(params.row_offsets, params.groups, row, params.scale_extents.rows);
  return AllLayouts::offset(params.layout, scale_row, rows.piece >> params.scale_block_shift,
                            params.scale_extents);
}

template <typename Split, typename Stored>
__device__ void load_scales(const DequantizeParams& params, const RowSet& rows,
                            const Addresses<Stored>& addresses, Stored* scales) {
  if (sizeof(Stored) == sizeof(float) && params.row_offsets != nullptr) {
#pragma unroll
    for (int i = 0; i < Split::kRows; ++i) {
      scales[i] = load_readonly<Stored>(addresses.batch_scales + grouped_scale(params, rows, i));
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < Split::kRows; ++i) {
    scales[i] = load_readonly<Stored>(addresses.scale + rows.distance(i, params.scale_step));
  }
}

template <typename Split, typename Stored>
__device__ void load_global_scales(const DequantizeParams& params, const RowSet& rows,
                                   const Addresses<Stored>& addresses, float* global_scales) {
  const bool is_one = params.global_scale == nullptr;
  const int64_t step = params.global_row_step << params.row_step_log2;
#pragma unroll
  for (int i = 0; i < Split::kRows; ++i) {
    global_scales[i] =
        is_one ? 1.0F : load_readonly<float>(addresses.global_scale + rows.distance(i, step));
  }
}

template <BlockFormat Format, typename Output, typename Split>
__global__ void __launch_bounds__(kMaxThreads)
    dequantize_rows_kernel(const __grid_constant__ DequantizeParams params) {
  using Piece = CodePiece<typename Format::Element, Output::kPieceElements>;
  using Stored = typename Format::Stored;
  const RowSet rows = assign_rows<Split>(params);
  if (rows.num_rows == 0) return;
  const Addresses<Stored> addresses = locate<Piece, Stored>(params, rows);
  const int64_t value_step = params.value_row_bytes << params.row_step_log2;
  const int64_t output_step = params.output_row_bytes << params.row_step_log2;
  wait_for_previous_grids();
  Piece codes[Split::kRows];
#pragma unroll
  for (int i = 0; i < Split::kRows; ++i) {
    codes[i].load(addresses.codes + rows.distance(i, value_step));
  }
  Stored scales[Split::kRows];
  load_scales<Split>(params, rows, addresses, scales);
  float global_scales[Split::kRows] = {};
  if constexpr (Format::kHasGlobalScale) {
    load_global_scales<Split>(params, rows, addresses, global_scales);
  }
  trigger_dependent_launch();
#pragma unroll
  for (int i = 0; i < Split::kRows; ++i) {
    const float factor =
        block_factor<Format>(scales[i], global_scales[i], params.global_scale_divides);
    const uint4 piece = dequantize_piece<Output>(codes[i], factor);
    if (i < rows.num_rows) store(addresses.output + i * output_step, piece);
  }
}

int64_t global_scale_step(GlobalScaleAxis axis, bool along_batch, int64_t rows) {
  switch (axis) {
    case GlobalScaleAxis::kNone:
    case GlobalScaleAxis::kTensor:
      return 0;
    case GlobalScaleAxis::kRow:
      return along_batch ? 0 : 1;
    case GlobalScaleAxis::kBatchRow:
      return along_batch ? rows : 1;
    case GlobalScaleAxis::kBatch:
      return along_batch ? 1 : 0;
  }
  return 0;
}

int64_t piece_elements(DType output) { return 16 / (bits(output) / 8); }

uint32_t log2_of(int64_t power_of_two) {
  return static_cast<uint32_t>(__builtin_ctzll(static_cast<unsigned long long>(power_of_two)));
}

// A block of 0 rows or columns is the whole extent: the shift then turns every index to 0.
uint32_t shift_of_extent(int64_t extent, int64_t unit) {
  return extent == 0 ? 31 : log2_of(extent / unit);
}

// The distribution of rows to threads.
struct RowPlan {
  int64_t rows_per_set = FourRows::kRows;
  int64_t row_step = 1;
  int threads = kMaxThreads;
  [[nodiscard]] int64_t sets(int64_t rows) const {
    return ceil_div(rows, rows_per_set * row_step) * row_step;
  }
};

RowPlan plan_rows(const DequantizeProblem& problem) {
  constexpr int64_t kThreadsPerSm = 2048;
  const int64_t num_sms = cuda_device(problem.device.index).num_sms;
  const int64_t pieces =
      problem.batch * problem.rows * (problem.cols / piece_elements(problem.output));
  RowPlan plan;
  if (pieces <= num_sms * kThreadsPerSm) {
    plan.rows_per_set = OneRow::kRows;
    if (pieces <= num_sms * kMaxThreads) plan.threads = kMaxThreads / 2;
  } else if (problem.layout == ScaleLayoutId::kSwizzled128x4) {
    plan.row_step = 32;
  }
  return plan;
}

DequantizeParams make_params(const DequantizeProblem& problem, const DequantizeArgs& args,
                             const RowPlan& plan) {
  const FormatInfo& info = format_info(problem.format);
  const int64_t per_piece = piece_elements(problem.output);
  DequantizeParams params;
  params.values = args.values;
  params.scales = args.scales.data;
  if (problem.global_axis != GlobalScaleAxis::kNone) params.global_scale = args.global_scale;
  if (problem.groups > 0) params.row_offsets = args.row_offsets.data();
  params.output = static_cast<uint8_t*>(args.output);
  params.value_row_bytes = args.value_row_bytes;
  params.output_row_bytes = args.output_stride * (bits(problem.output) / 8);
  params.global_batch_step = global_scale_step(problem.global_axis, true, problem.rows);
  params.global_row_step = global_scale_step(problem.global_axis, false, problem.rows);
  params.groups = problem.groups;
  params.scales_per_batch = args.scales.capacity / args.scales.batch;
  params.scale_extents = {args.scales.rows, args.scales.blocks};
  params.layout = problem.layout;
  params.scale_row_shift = shift_of_extent(info.block_rows, 1);
  params.scale_block_shift = shift_of_extent(info.block_cols, per_piece);
  params.scale_step = AllLayouts::offset(problem.layout, plan.row_step >> params.scale_row_shift, 0,
                                         params.scale_extents);
  params.rows = static_cast<uint32_t>(problem.rows);
  params.row_step_log2 = log2_of(plan.row_step);
  params.pieces_per_row = FastDivisor(static_cast<uint32_t>(problem.cols / per_piece));
  params.sets_per_batch = FastDivisor(static_cast<uint32_t>(plan.sets(problem.rows)));
  params.global_scale_divides = problem.global_scale_divides;
  return params;
}

using Kernel = void (*)(DequantizeParams);

template <BlockFormat Format, typename Split>
Kernel kernel_for_output(DType output) {
  if (output == DType::kF16) return dequantize_rows_kernel<Format, F16Output, Split>;
  if (output == DType::kBF16) return dequantize_rows_kernel<Format, Bf16Output, Split>;
  return dequantize_rows_kernel<Format, F32Output, Split>;
}

template <typename Split>
Kernel kernel_for(const DequantizeProblem& problem) {
  switch (problem.format) {
    case FormatId::kNvfp4:
    case FormatId::kNvfp4PerToken:
      return kernel_for_output<Nvfp4, Split>(problem.output);
    case FormatId::kMxfp4:
      return kernel_for_output<Mxfp4, Split>(problem.output);
    case FormatId::kMxfp8:
      return kernel_for_output<Mxfp8, Split>(problem.output);
    default:
      // The kernel takes the extents of a block as shifts.
      return kernel_for_output<Fp8Block1x128, Split>(problem.output);
  }
}

void launch_dequantize_rows(const DequantizeProblem& problem, const DequantizeArgs& args,
                            Stream stream) {
  if (problem.batch == 0 || problem.rows == 0 || problem.cols == 0) return;
  const CudaDeviceScope scope(problem.device);
  const RowPlan plan = plan_rows(problem);
  DequantizeParams params = make_params(problem, args, plan);
  const int64_t pieces = problem.cols / piece_elements(problem.output);
  const int64_t sets = problem.batch * plan.sets(problem.rows);
  const Kernel kernel = plan.rows_per_set == OneRow::kRows ? kernel_for<OneRow>(problem)
                                                           : kernel_for<FourRows>(problem);
  const int64_t sets_per_launch = std::max<int64_t>(1, (kMaxIndex - kMaxThreads) / pieces);
  for (int64_t first = 0; first < sets; first += sets_per_launch) {
    const int64_t threads = std::min(sets - first, sets_per_launch) * pieces;
    params.first_set = static_cast<uint32_t>(first);
    params.num_threads = static_cast<uint32_t>(threads);
    const auto blocks = static_cast<unsigned>(ceil_div(threads, plan.threads));
    launch(kernel, {dim3(blocks), dim3(static_cast<unsigned>(plan.threads))}, stream, params);
  }
}

Support supports(const DequantizeProblem& problem) {
  if (problem.rows > kMaxIndex || problem.cols / 4 > kMaxIndex - kMaxThreads) {
    return Support::no("rows beyond 2^31 or columns beyond 2^33");
  }
  if (problem.batch * plan_rows(problem).sets(problem.rows) > kMaxIndex) {
    return Support::no("more than 2^31 sets of rows");
  }
  return Support::yes();
}

}  // namespace

const DequantizeImpl kDequantizeSm90{"sm90_rows", on_own_code<supports>, launch_dequantize_rows};
const DequantizeImpl kDequantizeSm80{"sm80_rows", on_portable_code<supports>,
                                     launch_dequantize_rows};

}  // namespace narrowfloat
