// sm90_portable: every activation, gate order and parameter, of F32, BF16 or E4M3 rows, to rows of
// every format but NVFP4 per token, with the CPU's bits.
//
//   h     = activated(u, g) of activation_math.h, from single IEEE operations (moe spec 6.2)
//   codes = encode_row.cuh: bf16, fp32, E4M3 with a static multiplier or 1x128 scales, MXFP8, NVFP4
//
// A warp computes 128 output columns of one row, a lane four neighbouring ones. The limit is the
// arithmetic, 60 to 500 instructions an output, not memory.
//
// Bytes per output: the input's element twice (once if not gated), 0.5 to 4 for the code, less than
// one for scales.
#include "device/ptx/grid_dependency.cuh"
#include "ops/activation/activation_columns_sm90.cuh"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/launch.h"

namespace narrowfloat {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;

__device__ Place assign_place(const PortableParams& params) {
  const uint32_t item = blockIdx.x * kWarps + threadIdx.x / kWarpSize;
  const uint32_t entry = params.groups.quotient(item);
  const uint32_t group = item - entry * params.groups.divisor();
  const RowSet<1> set = find_rows<1>(params.named, entry);
  return {.row = set.row[0],
          .limit = set.limit,
          .group = group,
          .col = group * kGroupCols + threadIdx.x % kWarpSize * kLaneCols};
}

template <RowFormat kFormat>
__global__ void __launch_bounds__(kThreads)
    activate_portable_kernel(const __grid_constant__ PortableParams params) {
  wait_for_previous_grids();
  const Place place = assign_place(params);
  if (place.row == kNoRow) return;
  const int32_t expert = expert_of(params, place.row);
  if (expert < 0) return;
  // False past the end of a short group.
  const bool has_columns = place.col < params.inter;
  const GateAndUp in = has_columns ? load_gate_and_up(params, place) : GateAndUp{};
  const ActivationParams<float> activation = params_of(params, expert);
  const float multiplier = value_of(params.multiplier, expert);
  trigger_dependent_launch();
  const FourColumns h = activate_columns<kThreads>(params, in, activation);
  encode_row_group<kFormat>(has_columns ? h : FourColumns{}, place.col, has_columns,
                            row_factors<kFormat>(multiplier), output_target(params, place));
}

using Kernel = void (*)(PortableParams);

Kernel kernel_of(RowFormat format) {
  switch (format) {
    case RowFormat::kBf16:
      return activate_portable_kernel<RowFormat::kBf16>;
    case RowFormat::kFp32:
      return activate_portable_kernel<RowFormat::kFp32>;
    case RowFormat::kFp8Static:
      return activate_portable_kernel<RowFormat::kFp8Static>;
    case RowFormat::kFp8Group:
      return activate_portable_kernel<RowFormat::kFp8Group>;
    case RowFormat::kMxfp8:
      return activate_portable_kernel<RowFormat::kMxfp8>;
    case RowFormat::kNvfp4:
      return activate_portable_kernel<RowFormat::kNvfp4>;
    case RowFormat::kNvfp4PerToken:
    case RowFormat::kFp8Token:
      break;
  }
  return nullptr;
}

void launch_activate_portable(const ActivationProblem& problem, const ActivationArgs& args,
                              Stream stream) {
  const CudaDeviceScope scope(problem.device);
  if (problem.slots == 0 || problem.rows == 0 || problem.inter == 0) return;
  const int64_t items = problem.slots * ceil_div(problem.inter, kGroupCols);
  launch(kernel_of(problem.format),
         {.ctas = dim3(static_cast<unsigned>(ceil_div(items, kWarps))), .threads = dim3(kThreads)},
         stream, portable_params(problem, args));
}

Support supports(const ActivationProblem& problem) {
  if (kernel_of(problem.format) == nullptr) return Support::no("finds no maximum of a whole row");
  if (problem.input == DType::kF64) return Support::no("computes in fp32; only the CPU takes F64");
  return fits_flat_index(problem);
}

}  // namespace

const ActivationImpl kActivationSm90Portable{"sm90_portable", on_own_code<supports>,
                                             launch_activate_portable};
const ActivationImpl kActivationSm80Portable{"sm80_portable", on_portable_code<supports>,
                                             launch_activate_portable};

}  // namespace narrowfloat
