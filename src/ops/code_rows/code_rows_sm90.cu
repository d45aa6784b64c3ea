// sm90_groups and sm90_token_rows: BF16, F16 or F32 rows to every row format, with the bits of
// quantize(); rows may be gathered, and may have a multiplier for each expert.
//
// Threads to data: device/code_rows.cuh. sm90_groups gives every group of every row a warp of its
// own; sm90_token_rows, for NVFP4 per token, gives a row a block, which first finds the row's
// maximum and then reads the row a second time, from the caches. Either leaves rows as bf16, too,
// where a GEMM takes them so (tensor/decoded_rows.h).
//
// Bytes an element: 2 or 4 for the input, 0.5 to 4 for the code, less than one for scales. The
// layer codes T rows once and reads them k times in the first GEMM: a small part of it.
#include "base/int_math.h"
#include "device/code_rows.cuh"
#include "ops/code_rows/code_rows_problem.h"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/launch.h"
#include "tensor/row_format.h"

namespace narrowfloat {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;
template <RowFormat kFormat, int kGroups>
__global__ void __launch_bounds__(kThreads)
    code_groups_kernel(const __grid_constant__ CodeRowsParams params) {
  wait_for_previous_grids();
  code_bundle<kFormat, kGroups>(params, blockIdx.x * kWarps + threadIdx.x / kWarpSize);
}

__global__ void __launch_bounds__(kThreads)
    code_token_rows_kernel(const __grid_constant__ CodeRowsParams params) {
  __shared__ uint32_t shared_scratch[kWarps];
  wait_for_previous_grids();
  code_token_row(params, blockIdx.x, shared_scratch);
}

CodeRowsParams make_params(const CodeRowsProblem& problem, const CodeRowsArgs& args) {
  const auto row_size = static_cast<uint64_t>(row_bytes(problem.format, problem.cols));
  const auto tile = static_cast<uint32_t>(problem.per_expert ? args.token_tile : 1);
  return {.input = static_cast<const uint8_t*>(args.rows.data),
          .output = device_rows(args.output, row_size),
          .decoded = args.decoded,
          .input_dtype = problem.input,
          .input_max = largest_finite_of(problem.input),
          .map = problem.choice == RowChoice::kAll ? nullptr
                                                   : static_cast<const int32_t*>(args.map.data),
          .gathers = problem.choice == RowChoice::kGathered,
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
