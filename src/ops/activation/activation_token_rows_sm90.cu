// sm90_token_rows: every activation, gate order and parameter, of F32, BF16 or E4M3 rows, to rows
// with a multiplier each, with the CPU's bits.
//
//   h         = bf16(activated(u, g))                                 (moe spec 6.2, 6.4)
//   row scale = max |h| over the row / 2688 (NVFP4, spec 6.2), / 448 (FP8, spec 6.7)
//   codes     = E2M1 with E4M3 scales per 16 columns, or E4M3, of h times the encode factor
//
// A CTA computes one row; its warps loop over the row's groups of 128 columns, and a lane has four
// neighbouring columns of each. The first pass finds the maximum, the second one encodes. h stays
// in shared memory in between; columns beyond its size are computed twice.
//
// Bytes per output: the input's element twice (once if not gated), 0.5 for the code and 1 / 16 for
// the scale, or 1 for the code.
#include "device/packed16.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "ops/activation/activation_columns_sm90.cuh"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/launch.h"

namespace narrowfloat {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
// Groups of 128 columns that are kept in shared memory: 32 KiB.
constexpr uint32_t kMaxKeptGroups = 128;

constexpr float kLargestBf16 = 0x1.FEp127F;

// h of four columns as bf16.
using KeptColumns = uint2;

__device__ FourColumns widened(const KeptColumns& kept) {
  return {PackedBf16::low(kept.x), PackedBf16::high(kept.x), PackedBf16::low(kept.y),
          PackedBf16::high(kept.y)};
}

// A row and its parameters.
struct Row {
  Place place;  // The column is that of the current group.
  ActivationParams<float> activation;
};

// All lanes of a warp take part.
__device__ KeptColumns activate_group(const PortableParams& params, Row& row, uint32_t group) {
  row.place.group = group;
  row.place.col = group * kGroupCols + threadIdx.x % kWarpSize * kLaneCols;
  if (row.place.col >= params.inter) return {};
  const GateAndUp in = load_gate_and_up(params, row.place);
  const FourColumns h = activate_columns<kThreads>(params, in, row.activation);
  return {to_bf16x2(h.value[0], h.value[1]), to_bf16x2(h.value[2], h.value[3])};
}

// The maximum over the thread's columns of the row; NaN does not count.
__device__ float activate_row(const PortableParams& params, Row& row, KeptColumns* shared_kept) {
  float amax = 0.0F;
  for (uint32_t group = threadIdx.x / kWarpSize; group < params.groups.divisor(); group += kWarps) {
    const KeptColumns kept = activate_group(params, row, group);
    if (group < kMaxKeptGroups) {
      shared_kept[group * kWarpSize + threadIdx.x % kWarpSize] = kept;
    }
    const FourColumns h = widened(kept);
#pragma unroll
    for (const float value : h.value) amax = fmaxf(amax, fabsf(value));
  }
  return amax;
}

template <RowFormat kFormat>
__device__ void encode_groups(const PortableParams& params, Row& row, const RowFactors& factors,
                              const KeptColumns* shared_kept) {
  const RowTarget target = output_target(params, row.place);
  for (uint32_t group = threadIdx.x / kWarpSize; group < params.groups.divisor(); group += kWarps) {
    const KeptColumns kept = group < kMaxKeptGroups
                                 ? shared_kept[group * kWarpSize + threadIdx.x % kWarpSize]
                                 : activate_group(params, row, group);
    const uint32_t col = group * kGroupCols + threadIdx.x % kWarpSize * kLaneCols;
    encode_row_group<kFormat>(widened(kept), col, col < params.inter, factors, target);
  }
}

template <RowFormat kFormat>
__global__ void __launch_bounds__(kThreads)
    activate_token_rows_kernel(const __grid_constant__ PortableParams params) {
  NF_DYNAMIC_SHARED(KeptColumns, shared_kept, alignof(KeptColumns));
  __shared__ uint32_t shared_scratch[kWarps];
  wait_for_previous_grids();
  const RowSet<1> set = find_rows<1>(params.named, blockIdx.x);
  if (set.row[0] == kNoRow) return;
  const int32_t expert = expert_of(params, set.row[0]);
  if (expert < 0) return;
  Row row{.place = {.row = set.row[0], .limit = set.limit, .group = 0, .col = 0},
          .activation = params_of(params, expert)};
  trigger_dependent_launch();
  const float amax = activate_row(params, row, shared_kept);
  // The barrier in block_max() also makes kept columns visible, though each thread reads only its
  // own.
  const float row_amax = bits_float(block_max(float_bits(amax), shared_scratch));
  const RowFactors factors = token_row_factors<kFormat>(
      row_amax, params.output.target(row.place.row), threadIdx.x == 0, kLargestBf16);
  encode_groups<kFormat>(params, row, factors, shared_kept);
}

void launch_activate_token_rows(const ActivationProblem& problem, const ActivationArgs& args,
                                Stream stream) {
  const CudaDeviceScope scope(problem.device);
  if (problem.slots == 0 || problem.rows == 0) return;
  const PortableParams params = portable_params(problem, args);
  const uint32_t groups = params.groups.divisor();
  const size_t kept_groups = groups < kMaxKeptGroups ? groups : kMaxKeptGroups;
  const bool is_fp8 = problem.format == RowFormat::kFp8Token;
  launch(is_fp8 ? activate_token_rows_kernel<RowFormat::kFp8Token>
                : activate_token_rows_kernel<RowFormat::kNvfp4PerToken>,
         {.ctas = dim3(static_cast<unsigned>(problem.slots)),
          .threads = dim3(kThreads),
          .shared_bytes = kept_groups * kWarpSize * sizeof(KeptColumns)},
         stream, params);
}

Support supports(const ActivationProblem& problem) {
  if (!has_row_scale(problem.format)) {
    return Support::no("writes nvfp4_per_token and fp8_token rows only");
  }
  if (problem.input == DType::kF64) return Support::no("computes in fp32; only the CPU takes F64");
  return fits_flat_index(problem);
}

}  // namespace

const ActivationImpl kActivationSm90TokenRows{"sm90_token_rows", on_own_code<supports>,
                                              launch_activate_token_rows};
const ActivationImpl kActivationSm80TokenRows{"sm80_token_rows", on_portable_code<supports>,
                                              launch_activate_token_rows};

}  // namespace narrowfloat
