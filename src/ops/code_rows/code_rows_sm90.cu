// sm90_groups and sm90_token_rows: BF16, F16 or F32 rows to every row format, with the bits of
// quantize(); rows may be gathered, and may have a multiplier for each expert.
//
// Threads to data: a warp works on 128 columns of one row, a lane on four neighbouring ones, read
// in one access of 8 or 16 bytes. sm90_groups gives every group of every row a warp of its own;
// sm90_token_rows, for NVFP4 per token, gives a row a block, which first finds the row's maximum
// and then reads the row a second time, from the caches.
//
// Bytes an element: 2 or 4 for the input, 0.5 to 4 for the code, less than one for scales. The
// layer codes T rows once and reads them k times in the first GEMM: a small part of it.
#include "base/fast_division.h"
#include "base/int_math.h"
#include "device/encode_row.cuh"
#include "device/packed16.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "ops/code_rows/code_rows_problem.h"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/launch.h"
#include "tensor/row_format.h"

namespace narrowfloat {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;
constexpr uint32_t kNoRow = 0xFFFFFFFFU;

struct CodeRowsParams {
  const uint8_t* input;  // [input_rows, cols]
  DeviceRows output;     // [rows, cols]
  DType input_dtype;
  float input_max;
  RowChoice choice;
  const int32_t* map;  // One for each row of the output, or null.
  uint32_t input_rows;
  uint32_t rows;
  uint32_t cols;
  uint32_t groups;      // Of 128 columns, in a row.
  FastDivisor bundles;  // Of groups, in a row.
  float multiplier;
  // Where there is a multiplier per expert. Otherwise null.
  const float* multipliers;
  const int32_t* tile_to_expert;
  FastDivisor token_tile;
  int32_t experts;
};

// The row that row `row` of the output is made from, or kNoRow: whatever the map holds, no row
// beyond the buffers.
__device__ uint32_t source_of(const CodeRowsParams& params, uint32_t row) {
  if (row >= params.rows) return kNoRow;
  uint32_t source = row;
  if (params.choice != RowChoice::kAll) {
    const auto entry = load_readonly<int32_t>(params.map + row);
    if (entry < 0) return kNoRow;
    if (params.choice == RowChoice::kGathered) source = static_cast<uint32_t>(entry);
  }
  return source < params.input_rows ? source : kNoRow;
}

__device__ float multiplier_of(const CodeRowsParams& params, uint32_t row) {
  if (params.multipliers == nullptr) return params.multiplier;
  const auto tile = params.token_tile.quotient(row);
  const auto expert = load_readonly<int32_t>(params.tile_to_expert + tile);
  const bool exists = expert >= 0 && expert < params.experts;
  return exists ? load_readonly<float>(params.multipliers + expert) : 1.0F;
}

template <class Half>
__device__ FourColumns widened(uint2 words) {
  return {Half::low(words.x), Half::high(words.x), Half::low(words.y), Half::high(words.y)};
}

__device__ FourColumns load_columns(const CodeRowsParams& params, uint32_t row, uint32_t col) {
  const uint64_t element = uint64_t{row} * params.cols + col;
  if (params.input_dtype == DType::kF32) {
    return bit_cast<FourColumns>(load_readonly<float4>(params.input + 4 * element));
  }
  const auto words = load_readonly<uint2>(params.input + 2 * element);
  return params.input_dtype == DType::kBF16 ? widened<PackedBf16>(words)
                                            : widened<PackedF16>(words);
}

__device__ uint32_t lane_col(uint32_t group) {
  return group * kRowGroupCols + threadIdx.x % kWarpSize * kLaneCols;
}

// kGroups neighbouring groups of a row, all of them loaded before the first is encoded.
template <RowFormat kFormat, int kGroups>
__global__ void __launch_bounds__(kThreads)
    code_groups_kernel(const __grid_constant__ CodeRowsParams params) {
  wait_for_previous_grids();
  const uint32_t item = blockIdx.x * kWarps + threadIdx.x / kWarpSize;
  const uint32_t row = params.bundles.quotient(item);
  const uint32_t source = source_of(params, row);
  if (source == kNoRow) return;
  const uint32_t first = (item - row * params.bundles.divisor()) * kGroups;
  FourColumns x[kGroups];
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const uint32_t col = lane_col(first + i);
    x[i] = col < params.cols ? load_columns(params, source, col) : FourColumns{};
  }
  const RowFactors factors = row_factors<kFormat>(multiplier_of(params, row), params.input_max);
  allow_next_grid();
  const RowTarget target = params.output.target(row);
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const uint32_t col = lane_col(first + i);
    encode_row_group<kFormat>(x[i], col, col < params.cols, factors, target);
  }
}

// Over the thread's columns; NaN does not count.
__device__ float find_row_maximum(const CodeRowsParams& params, uint32_t source) {
  float amax = 0.0F;
  for (uint32_t col = threadIdx.x * kLaneCols; col < params.cols; col += kThreads * kLaneCols) {
    const FourColumns x = load_columns(params, source, col);
#pragma unroll
    for (const float value : x.value) amax = fmaxf(amax, fabsf(value));
  }
  return amax;
}

__global__ void __launch_bounds__(kThreads)
    code_token_rows_kernel(const __grid_constant__ CodeRowsParams params) {
  __shared__ uint32_t shared_scratch[kWarps];
  wait_for_previous_grids();
  const uint32_t source = source_of(params, blockIdx.x);
  if (source == kNoRow) return;
  const float amax = find_row_maximum(params, source);
  const float row_amax = bits_float(block_max(float_bits(amax), shared_scratch));
  const RowTarget target = params.output.target(blockIdx.x);
  const RowFactors factors = token_row_factors(row_amax, target, threadIdx.x == 0);
  allow_next_grid();
  for (uint32_t group = threadIdx.x / kWarpSize; group < params.groups; group += kWarps) {
    const uint32_t col = lane_col(group);
    const bool has_columns = col < params.cols;
    const FourColumns x = has_columns ? load_columns(params, source, col) : FourColumns{};
    encode_row_group<RowFormat::kNvfp4PerToken>(x, col, has_columns, factors, target);
  }
}

// Largest finite number of a plain type (spec 6.7).
float largest_finite_of(DType dtype) {
  if (dtype == DType::kBF16) return bits_float(0x7F7F0000U);
  return dtype == DType::kF16 ? 65504.0F : kFloatMax;
}

CodeRowsParams make_params(const CodeRowsProblem& problem, const CodeRowsArgs& args) {
  const auto row_size = static_cast<uint64_t>(row_bytes(problem.format, problem.cols));
  const auto tile = static_cast<uint32_t>(problem.per_expert ? args.token_tile : 1);
  return {.input = static_cast<const uint8_t*>(args.rows.data),
          .output = device_rows(args.output, row_size),
          .input_dtype = problem.input,
          .input_max = largest_finite_of(problem.input),
          .choice = problem.choice,
          .map = static_cast<const int32_t*>(args.map.data),
          .input_rows = static_cast<uint32_t>(problem.input_rows),
          .rows = static_cast<uint32_t>(problem.rows),
          .cols = static_cast<uint32_t>(problem.cols),
          .groups = static_cast<uint32_t>(ceil_div(problem.cols, kRowGroupCols)),
          .bundles = {},
          .multiplier = args.multiplier.value,
          .multipliers = static_cast<const float*>(args.multiplier.values.data),
          .tile_to_expert =
              problem.per_expert ? static_cast<const int32_t*>(args.tile_to_expert.data) : nullptr,
          .token_tile = FastDivisor(tile),
          .experts =
              static_cast<int32_t>(problem.per_expert ? args.multiplier.values.num_elements() : 0)};
}

using Kernel = void (*)(CodeRowsParams);

template <int kGroups>
Kernel kernel_of(RowFormat format) {
  switch (format) {
    case RowFormat::kFp8Static:
      return code_groups_kernel<RowFormat::kFp8Static, kGroups>;
    case RowFormat::kFp8Group:
      return code_groups_kernel<RowFormat::kFp8Group, kGroups>;
    case RowFormat::kMxfp8:
      return code_groups_kernel<RowFormat::kMxfp8, kGroups>;
    case RowFormat::kNvfp4:
      return code_groups_kernel<RowFormat::kNvfp4, kGroups>;
    default:
      return nullptr;
  }
}

// A warp of its own for each group while that keeps everybody busy; then as many bytes in flight as
// memory wants.
constexpr int64_t kFewGroups = 8192;
constexpr int kBundle = 4;

void launch_code_groups(const CodeRowsProblem& problem, const CodeRowsArgs& args, Stream stream) {
  const CudaDeviceScope scope(problem.device);
  if (problem.rows == 0 || problem.cols == 0) return;
  CodeRowsParams params = make_params(problem, args);
  const bool has_few = problem.rows * params.groups <= kFewGroups;
  const int64_t bundles = has_few ? params.groups : ceil_div(params.groups, kBundle);
  params.bundles = FastDivisor(static_cast<uint32_t>(bundles));
  const int64_t blocks = ceil_div(problem.rows * bundles, kWarps);
  launch(has_few ? kernel_of<1>(problem.format) : kernel_of<kBundle>(problem.format),
         {.blocks = dim3(static_cast<unsigned>(blocks)), .threads = dim3(kThreads)}, stream,
         params);
}

void launch_code_token_rows(const CodeRowsProblem& problem, const CodeRowsArgs& args,
                            Stream stream) {
  const CudaDeviceScope scope(problem.device);
  if (problem.rows == 0) return;
  launch(code_token_rows_kernel,
         {.blocks = dim3(static_cast<unsigned>(problem.rows)), .threads = dim3(kThreads)}, stream,
         make_params(problem, args));
}

Support fits(const CodeRowsProblem& problem) {
  if (Support on_cuda = runs_on_cuda(problem.device); !on_cuda.ok()) return on_cuda;
  if (problem.input == DType::kF64) return Support::no("reads no F64");
  constexpr int64_t kLimit = int64_t{1} << 31;
  const bool is_small = problem.cols < kLimit / 2 &&
                        problem.rows + kWarps < kLimit / ceil_div(problem.cols + 1, kRowGroupCols);
  return is_small ? Support::yes() : Support::no("needs fewer than 2^31 groups of 128 columns");
}

Support supports_groups(const CodeRowsProblem& problem) {
  if (kernel_of<1>(problem.format) == nullptr) {
    return Support::no("codes fp8_static, fp8_1x128, mxfp8 and nvfp4 rows only");
  }
  return fits(problem);
}

Support supports_token_rows(const CodeRowsProblem& problem) {
  if (problem.format != RowFormat::kNvfp4PerToken) {
    return Support::no("codes nvfp4_per_token rows only");
  }
  return fits(problem);
}

}  // namespace

const CodeRowsImpl kCodeRowsSm90Groups{"sm90_groups", supports_groups, launch_code_groups};
const CodeRowsImpl kCodeRowsSm90TokenRows{"sm90_token_rows", supports_token_rows,
                                          launch_code_token_rows};

}  // namespace narrowfloat
