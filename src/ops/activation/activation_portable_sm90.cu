// sm90_portable: every activation, gate order and parameter, of F32, BF16 or E4M3 rows, to E4M3
// with 1x128 scales, with the CPU's bits.
//
//   h     = activated(u, g) of activation_math.h, from single IEEE operations (moe spec 6.2)
//   a     = max |h| over 128 columns;  m = RN(448 / a), 1 for a = 0 or infinite
//   code  = E4M3(RN(h * m));           scale = RN(1 / m)                      (spec 6.7)
//
// Threads to data: a warp owns 128 output columns of one row, a lane four neighbouring ones: one
// access of 4 to 16 bytes for u and for g (two where they are interleaved), one word of codes. The
// arithmetic, 60 to 500 instructions an output, is the limit, not memory.
//
// Bytes an output: the input's element twice (once if not gated), one for the code, 3 / 32 or less
// for scales.
#include "base/fast_division.h"
#include "device/ptx/grid_dependency.cuh"
#include "device/reduce.cuh"
#include "ops/activation/activation_math.h"
#include "ops/activation/activation_rows_sm90.cuh"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/launch.h"

namespace narrowfloat {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kLaneCols = kGroupCols / kWarpSize;

// A parameter on the device: one value, or one per expert.
struct Parameter {
  const float* values;  // Null for one value.
  float value;
};

struct PortableParams {
  const uint8_t* input;  // [rows, input_cols]
  uint8_t* output;       // [rows, inter]
  ScaleImage<const float, uint64_t> input_scales;
  ScaleImage<float, uint64_t> output_scales;
  NamedRows named;
  FastDivisor groups;  // Of columns, in a row.
  uint32_t inter;
  uint32_t input_cols;
  DType input_dtype;
  ActivationKind kind;
  bool is_gated;
  GateOrder gate_order;
  // Where values are per expert: the tiles' experts. Otherwise null.
  const int32_t* tile_to_expert;
  FastDivisor token_tile;
  int32_t experts;
  Parameter alpha;
  Parameter beta;
  Parameter limit_gate;
  Parameter limit_up;
};

struct Place {
  uint32_t row;  // Or kNoRow.
  uint32_t limit;
  uint32_t group;
  uint32_t col;  // The lane's first.
};

struct FourColumns {
  float value[kLaneCols];
};

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

// Expert of a row; -1 where the map has none that exists.
__device__ int32_t expert_of(const PortableParams& params, uint32_t row) {
  if (params.tile_to_expert == nullptr) return 0;
  const uint32_t tile = params.token_tile.quotient(row);
  const auto expert = load_readonly<int32_t>(params.tile_to_expert + tile);
  return expert < params.experts ? expert : -1;
}

__device__ float value_of(const Parameter& parameter, int32_t expert) {
  if (parameter.values == nullptr) return parameter.value;
  return load_readonly<float>(parameter.values + expert);
}

__device__ ActivationParams<float> params_of(const PortableParams& params, int32_t expert) {
  return {.alpha = value_of(params.alpha, expert),
          .beta = value_of(params.beta, expert),
          .limit_gate = value_of(params.limit_gate, expert),
          .limit_up = value_of(params.limit_up, expert)};
}

__device__ FourColumns load_f32(const uint8_t* line, uint32_t col) {
  return bit_cast<FourColumns>(load_readonly<float4>(line + 4 * uint64_t{col}));
}
__device__ FourColumns load_bf16(const uint8_t* line, uint32_t col) {
  const auto words = load_readonly<uint2>(line + 2 * uint64_t{col});
  return {bits_float(words.x << 16), bits_float(words.x & 0xFFFF0000U), bits_float(words.y << 16),
          bits_float(words.y & 0xFFFF0000U)};
}
__device__ FourColumns load_e4m3(const uint8_t* line, uint32_t col, float scale) {
  const auto word = load_readonly<uint32_t>(line + col);
  const uint32_t low = e4m3x4_low_to_f16x2(word);
  const uint32_t high = e4m3x4_high_to_f16x2(word);
  return {__fmul_rn(f16_low_to_float(low), scale), __fmul_rn(f16_high_to_float(low), scale),
          __fmul_rn(f16_low_to_float(high), scale), __fmul_rn(f16_high_to_float(high), scale)};
}

// Columns [col, col + 4) of the input.
__device__ FourColumns load_columns(const PortableParams& params, const Place& place,
                                    uint32_t col) {
  const uint64_t first = uint64_t{place.row} * params.input_cols;
  if (params.input_dtype == DType::kF32) return load_f32(params.input + 4 * first, col);
  if (params.input_dtype == DType::kBF16) return load_bf16(params.input + 2 * first, col);
  const auto scales = params.input_scales.of_rows(params.named, place.limit);
  const float scale = load_readonly<float>(scales.place(place.row, col / kGroupCols));
  return load_e4m3(params.input + first, col, scale);
}

struct GateAndUp {
  FourColumns gate;
  FourColumns up;
};

__device__ GateAndUp load_gate_and_up(const PortableParams& params, const Place& place) {
  if (!params.is_gated) return {{}, load_columns(params, place, place.col)};
  if (params.gate_order != GateOrder::kInterleaved) {
    const FourColumns first = load_columns(params, place, place.col);
    const FourColumns second = load_columns(params, place, params.inter + place.col);
    return params.gate_order == GateOrder::kUpGate ? GateAndUp{second, first}
                                                   : GateAndUp{first, second};
  }
  const FourColumns low = load_columns(params, place, 2 * place.col);
  const FourColumns high = load_columns(params, place, 2 * place.col + kLaneCols);
  return {{low.value[0], low.value[2], high.value[0], high.value[2]},
          {low.value[1], low.value[3], high.value[1], high.value[3]}};
}

// A thread's columns, each thread its own. In shared memory because all kinds together are long
// code that should exist once: a loop over the columns needs an index that registers do not take.
struct SharedColumns {
  float gate[kLaneCols][kThreads];
  float up[kLaneCols][kThreads];
};

__device__ FourColumns activate_columns(const PortableParams& params, const GateAndUp& in,
                                        const ActivationParams<float>& activation) {
  __shared__ SharedColumns shared_columns;
  const uint32_t thread = threadIdx.x;
#pragma unroll
  for (int i = 0; i < kLaneCols; ++i) {
    shared_columns.gate[i][thread] = in.gate.value[i];
    shared_columns.up[i][thread] = in.up.value[i];
  }
#pragma unroll 1
  for (int i = 0; i < kLaneCols; ++i) {
    const float u = shared_columns.up[i][thread];
    shared_columns.up[i][thread] =
        activated(params.kind, u, shared_columns.gate[i][thread], activation);
  }
  FourColumns h;
#pragma unroll
  for (int i = 0; i < kLaneCols; ++i) h.value[i] = shared_columns.up[i][thread];
  return h;
}

__device__ void store_group(const PortableParams& params, const Place& place, bool has_columns,
                            const FourColumns& h) {
  float amax = 0.0F;
#pragma unroll
  for (const float value : h.value) amax = fmaxf(amax, fabsf(value));
  const BlockScale<float> scale =
      group_scale(bits_float(__reduce_max_sync(kFullWarp, float_bits(amax))));
  if (!has_columns) return;
  store(params.output + (uint64_t{place.row} * params.inter + place.col),
        encode_four(h.value, scale.multiplier));
  if (threadIdx.x % kWarpSize != 0) return;
  const auto scales = params.output_scales.of_rows(params.named, place.limit);
  *scales.place(place.row, place.group) = scale.stored;
}

__global__ void __launch_bounds__(kThreads)
    activate_portable_kernel(const __grid_constant__ PortableParams params) {
  wait_for_previous_grids();
  const Place place = assign_place(params);
  if (place.row == kNoRow) return;
  const int32_t expert = expert_of(params, place.row);
  if (expert < 0) return;
  // The end of a short group.
  const bool has_columns = place.col < params.inter;
  const GateAndUp in = has_columns ? load_gate_and_up(params, place) : GateAndUp{};
  const ActivationParams<float> activation = params_of(params, expert);
  allow_next_grid();
  const FourColumns h = activate_columns(params, in, activation);
  store_group(params, place, has_columns, has_columns ? h : FourColumns{});
}

Parameter parameter(const PerExpert& given) {
  return {.values = static_cast<const float*>(given.values.data), .value = given.value};
}

PortableParams make_params(const ActivationProblem& problem, const ActivationArgs& args) {
  const auto groups = static_cast<uint32_t>(ceil_div(problem.inter, kGroupCols));
  const auto token_tile = static_cast<uint32_t>(problem.per_expert ? args.token_tile : 1);
  return {.input = static_cast<const uint8_t*>(args.input.values.data),
          .output = static_cast<uint8_t*>(args.output.values.data),
          .input_scales = scale_image<const float, uint64_t>(args.input.scales),
          .output_scales = scale_image<float, uint64_t>(args.output.scales),
          .named = named_rows(problem, args, false),
          .groups = FastDivisor(groups),
          .inter = static_cast<uint32_t>(problem.inter),
          .input_cols = static_cast<uint32_t>(problem.input_cols),
          .input_dtype = problem.input,
          .kind = problem.kind,
          .is_gated = activation_info(problem.kind).is_gated,
          .gate_order = problem.gate_order,
          .tile_to_expert = problem.per_expert ? args.tile_to_expert : nullptr,
          .token_tile = FastDivisor(token_tile),
          .experts = static_cast<int32_t>(args.experts),
          .alpha = parameter(args.activation.alpha),
          .beta = parameter(args.activation.beta),
          .limit_gate = parameter(args.activation.limit_gate),
          .limit_up = parameter(args.activation.limit_up)};
}

void launch_activate_portable(const ActivationProblem& problem, const ActivationArgs& args,
                              Stream stream) {
  const CudaDeviceScope scope(problem.device);
  if (problem.slots == 0 || problem.rows == 0 || problem.inter == 0) return;
  const int64_t items = problem.slots * ceil_div(problem.inter, kGroupCols);
  launch(
      activate_portable_kernel,
      {.blocks = dim3(static_cast<unsigned>(ceil_div(items, kWarps))), .threads = dim3(kThreads)},
      stream, make_params(problem, args));
}

Support supports(const ActivationProblem& problem) {
  if (Support on_cuda = runs_on_cuda(problem.device); !on_cuda.ok()) return on_cuda;
  if (problem.format != RowFormat::kFp8Group) return Support::no("writes fp8_1x128 rows only");
  if (problem.input == DType::kF64) return Support::no("computes in fp32: F64 is for the CPU");
  return fits_flat_index(problem);
}

}  // namespace

const ActivationImpl kActivationSm90Portable{"sm90_portable", supports, launch_activate_portable};

}  // namespace narrowfloat
