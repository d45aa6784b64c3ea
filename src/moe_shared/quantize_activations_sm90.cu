// sm90_groups and sm90_token_rows: BF16, F16 or F32 rows to every row format, with the bits of
// quantize(); rows may be gathered, and may have a multiplier for each expert.
//
// moe_shared/quantize_activations.cuh maps threads to data. sm90_groups gives every group of every
// row a warp. sm90_token_rows, for formats with a row scale, gives a row a CTA, which first finds
// the row's maximum. It keeps rows of up to 8192 columns of a 16-bit type in registers meanwhile,
// for E4M3; others it reads again, from the caches. Both store rows as bf16, too, where a GEMM
// reads them so (moe_shared/dequantized_rows.h).
//
// Bytes per element: 2 or 4 for the input, 0.5 to 4 for the code, less than one for scales. The
// layer quantizes T rows once and reads them k times in the first GEMM, so this is a small part of
// it.
#include "base/int_math.h"
#include "moe_shared/quantize_activations.cuh"
#include "moe_shared/quantize_activations_problem.h"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/launch.h"
#include "tensor/row_format.h"

namespace narrowfloat {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;
template <RowFormat kFormat, int kGroups>
__global__ void __launch_bounds__(kThreads)
    quantize_activation_groups_kernel(const __grid_constant__ QuantizeActivationsParams params) {
  wait_for_previous_grids();
  quantize_bundle<kFormat, kGroups>(params, blockIdx.x * kWarps + threadIdx.x / kWarpSize);
}

// Threads of a CTA that quantizes a long row.
constexpr int kMostRowThreads = 256;

template <RowFormat kFormat>
__global__ void __launch_bounds__(kMostRowThreads)
    quantize_activation_rows_kernel(const __grid_constant__ QuantizeActivationsParams params) {
  __shared__ uint32_t shared_scratch[kMostRowThreads / kWarpSize];
  // The second GEMM of a layer requests weights before its wait.
  trigger_dependent_launch_before_wait();
  wait_for_previous_grids();
  const RowPair pair = pair_of(params, blockIdx.x);
  if constexpr (kFormat == RowFormat::kFp8Token) {
    if (holds_row(params)) return quantize_held_row(params, pair, shared_scratch);
  }
  quantize_token_row<kFormat>(params, pair, shared_scratch);
}

// Rows of the output that are looked at.
int64_t rows_of(const QuantizeActivationsProblem& problem, const QuantizeActivationsArgs& args) {
  return problem.choice == RowChoice::kListed ? args.map.num_elements() : problem.rows;
}

QuantizeActivationsParams make_params(const QuantizeActivationsProblem& problem,
                                      const QuantizeActivationsArgs& args) {
  const auto row_size = static_cast<uint64_t>(row_bytes(problem.format, problem.cols));
  const auto tile = static_cast<uint32_t>(problem.per_expert ? args.token_tile : 1);
  return {.input = static_cast<const uint8_t*>(args.rows.data),
          .output = device_rows(args.output, row_size),
          .dequantized = args.dequantized,
          .input_dtype = problem.input,
          .input_max = largest_finite_of(problem.input),
          .map = problem.choice == RowChoice::kAll ? nullptr
                                                   : static_cast<const int32_t*>(args.map.data),
          .is_list = problem.choice == RowChoice::kListed,
          .input_rows = static_cast<uint32_t>(problem.input_rows),
          .rows = static_cast<uint32_t>(rows_of(problem, args)),
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

using Kernel = void (*)(QuantizeActivationsParams);

template <int kGroups>
Kernel kernel_of(RowFormat format) {
  switch (format) {
    case RowFormat::kFp8Static:
      return quantize_activation_groups_kernel<RowFormat::kFp8Static, kGroups>;
    case RowFormat::kFp8Group:
      return quantize_activation_groups_kernel<RowFormat::kFp8Group, kGroups>;
    case RowFormat::kMxfp8:
      return quantize_activation_groups_kernel<RowFormat::kMxfp8, kGroups>;
    case RowFormat::kNvfp4:
      return quantize_activation_groups_kernel<RowFormat::kNvfp4, kGroups>;
    default:
      return nullptr;
  }
}

// A warp quantizes one group while there are few groups, to use all SMs; more groups per warp then
// raise the bytes in flight.
constexpr int64_t kFewGroups = 8192;
constexpr int kBundle = 4;

void launch_groups(const QuantizeActivationsProblem& problem, const QuantizeActivationsArgs& args,
                   Stream stream) {
  const CudaDeviceScope scope(problem.device);
  if (rows_of(problem, args) == 0 || problem.cols == 0) return;
  QuantizeActivationsParams params = make_params(problem, args);
  const bool has_few = int64_t{params.rows} * params.groups <= kFewGroups;
  const int64_t bundles = has_few ? params.groups : ceil_div(params.groups, kBundle);
  params.bundles = FastDivisor(static_cast<uint32_t>(bundles));
  const int64_t blocks = ceil_div(int64_t{params.rows} * bundles, int64_t{kWarps});
  launch(has_few ? kernel_of<1>(problem.format) : kernel_of<kBundle>(problem.format),
         {.ctas = dim3(static_cast<unsigned>(blocks)), .threads = dim3(kThreads)}, stream, params);
}

void launch_token_rows(const QuantizeActivationsProblem& problem,
                       const QuantizeActivationsArgs& args, Stream stream) {
  const CudaDeviceScope scope(problem.device);
  if (rows_of(problem, args) == 0) return;
  const QuantizeActivationsParams params = make_params(problem, args);
  const bool is_fp8 = problem.format == RowFormat::kFp8Token;
  const bool has_long_rows = is_fp8 && params.groups > kHeldGroups * kWarps;
  launch(is_fp8 ? quantize_activation_rows_kernel<RowFormat::kFp8Token>
                : quantize_activation_rows_kernel<RowFormat::kNvfp4PerToken>,
         {.ctas = dim3(params.rows), .threads = dim3(has_long_rows ? kMostRowThreads : kThreads)},
         stream, params);
}

Support fits(const QuantizeActivationsProblem& problem) {
  if (problem.input == DType::kF64) return Support::no("does not read F64 rows");
  constexpr int64_t kLimit = int64_t{1} << 31;
  const bool is_small = problem.cols < kLimit / 2 &&
                        problem.rows + kWarps < kLimit / ceil_div(problem.cols + 1, kRowGroupCols);
  return is_small ? Support::yes() : Support::no("needs fewer than 2^31 groups of 128 columns");
}

Support supports_groups(const QuantizeActivationsProblem& problem) {
  if (kernel_of<1>(problem.format) == nullptr) {
    return Support::no("quantizes to fp8_static, fp8_1x128, mxfp8 and nvfp4 rows only");
  }
  return fits(problem);
}

Support supports_token_rows(const QuantizeActivationsProblem& problem) {
  if (!has_row_scale(problem.format)) {
    return Support::no("quantizes to nvfp4_per_token and fp8_token rows only");
  }
  return fits(problem);
}

}  // namespace

const QuantizeActivationsImpl kQuantizeActivationsSm90Groups{
    "sm90_groups", on_own_code<supports_groups>, launch_groups};
const QuantizeActivationsImpl kQuantizeActivationsSm80Groups{
    "sm80_groups", on_portable_code<supports_groups>, launch_groups};
const QuantizeActivationsImpl kQuantizeActivationsSm90TokenRows{
    "sm90_token_rows", on_own_code<supports_token_rows>, launch_token_rows};
const QuantizeActivationsImpl kQuantizeActivationsSm80TokenRows{
    "sm80_token_rows", on_portable_code<supports_token_rows>, launch_token_rows};

}  // namespace narrowfloat
