// The common part of the kernels of every activation: the row and columns of a lane, loads of u and
// g in every gate order and input type, and h with the CPU's bits.
//
//   h = activated(u, g) of activation_math.h, from single IEEE operations (moe spec 6.2)
//
// A lane has four neighbouring columns of a row: one access of 4 to 16 bytes for u and for g (two
// where they are interleaved).
#pragma once

#include "base/fast_division.h"
#include "moe_shared/encode_row.cuh"
#include "ops/activation/activation_math.h"
#include "ops/activation/activation_rows_sm90.cuh"
#include "tensor/row_format.h"

namespace narrowfloat {

// A parameter on the device: one value, or one per expert.
struct Parameter {
  const float* values;  // Null for one value.
  float value;
};

struct PortableParams {
  const uint8_t* input;  // [rows, input_cols]
  ScaleMatrix<const float, uint64_t> input_scales;
  DeviceRows output;  // [rows, inter]
  NamedRows named;
  FastDivisor groups;  // Groups of columns in a row.
  uint32_t inter;
  uint32_t input_cols;
  DType input_dtype;
  ActivationKind kind;
  bool is_gated;
  GateOrder gate_order;
  // The experts of tiles if values are per expert, else null.
  const int32_t* tile_to_expert;
  FastDivisor token_tile;
  int32_t experts;
  Parameter alpha;
  Parameter beta;
  Parameter limit_gate;
  Parameter limit_up;
  Parameter multiplier;  // kFp8Static and kNvfp4.
};

struct Place {
  uint32_t row;  // Or kNoRow.
  uint32_t limit;
  uint32_t group;
  uint32_t col;  // First column of the lane.
};

// Expert of a row; -1 if the map has no valid one.
__device__ inline int32_t expert_of(const PortableParams& params, uint32_t row) {
  if (params.tile_to_expert == nullptr) return 0;
  const uint32_t tile = params.token_tile.quotient(row);
  const auto expert = load_readonly<int32_t>(params.tile_to_expert + tile);
  return expert < params.experts ? expert : -1;
}

__device__ inline float value_of(const Parameter& parameter, int32_t expert) {
  if (parameter.values == nullptr) return parameter.value;
  return load_readonly<float>(parameter.values + expert);
}

__device__ inline ActivationParams<float> params_of(const PortableParams& params, int32_t expert) {
  return {.alpha = value_of(params.alpha, expert),
          .beta = value_of(params.beta, expert),
          .limit_gate = value_of(params.limit_gate, expert),
          .limit_up = value_of(params.limit_up, expert)};
}

__device__ inline FourColumns load_f32(const uint8_t* line, uint32_t col) {
  return bit_cast<FourColumns>(load_readonly<float4>(line + 4 * uint64_t{col}));
}
__device__ inline FourColumns load_bf16(const uint8_t* line, uint32_t col) {
  const auto words = load_readonly<uint2>(line + 2 * uint64_t{col});
  return {bits_float(words.x << 16), bits_float(words.x & 0xFFFF0000U), bits_float(words.y << 16),
          bits_float(words.y & 0xFFFF0000U)};
}
__device__ inline FourColumns load_e4m3(const uint8_t* line, uint32_t col, float scale) {
  const auto word = load_readonly<uint32_t>(line + col);
  const uint32_t low = e4m3x4_low_to_f16x2(word);
  const uint32_t high = e4m3x4_high_to_f16x2(word);
  return {__fmul_rn(f16_low_to_float(low), scale), __fmul_rn(f16_high_to_float(low), scale),
          __fmul_rn(f16_low_to_float(high), scale), __fmul_rn(f16_high_to_float(high), scale)};
}

// Columns [col, col + 4) of the input.
__device__ inline FourColumns load_columns(const PortableParams& params, const Place& place,
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

__device__ inline GateAndUp load_gate_and_up(const PortableParams& params, const Place& place) {
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

// Columns of a thread, in shared memory. The code for all kinds is long and should exist once; it
// loops over the columns, and registers cannot be indexed.
template <int kThreads>
struct SharedColumns {
  float gate[kLaneCols][kThreads];
  float up[kLaneCols][kThreads];
};

template <int kThreads>
__device__ inline FourColumns activate_columns(const PortableParams& params, const GateAndUp& in,
                                               const ActivationParams<float>& activation) {
  FourColumns h;
  if (params.kind == ActivationKind::kSwiglu) {
    // The kind of most layers: four independent chains of operations.
#pragma unroll
    for (int i = 0; i < kLaneCols; ++i) {
      h.value[i] = activation_detail::swiglu(in.up.value[i], in.gate.value[i], activation);
    }
    return h;
  }
  __shared__ SharedColumns<kThreads> shared_columns;
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
#pragma unroll
  for (int i = 0; i < kLaneCols; ++i) h.value[i] = shared_columns.up[i][thread];
  return h;
}

// The destination of a row's codes. 1x128 scales [blocks, P] have strides that only the device
// knows.
__device__ inline RowTarget output_target(const PortableParams& params, const Place& place) {
  RowTarget target = params.output.target(place.row);
  if (params.named.num_rows == nullptr || params.output.scales == nullptr) return target;
  target.scales = params.output.scales + uint64_t{place.row} * sizeof(float);
  target.scale_stride = place.limit;
  return target;
}

inline Parameter parameter(const PerExpert& given) {
  return {.values = static_cast<const float*>(given.values.data), .value = given.value};
}

inline PortableParams portable_params(const ActivationProblem& problem,
                                      const ActivationArgs& args) {
  // A row without columns may still have a row scale.
  const auto groups =
      static_cast<uint32_t>(problem.inter == 0 ? 1 : ceil_div(problem.inter, kGroupCols));
  const auto token_tile = static_cast<uint32_t>(problem.per_expert ? args.token_tile : 1);
  return {.input = static_cast<const uint8_t*>(args.input.values.data),
          .input_scales = scale_matrix<const float, uint64_t>(args.input.scales),
          .output = device_rows(args.output,
                                static_cast<uint64_t>(row_bytes(problem.format, problem.inter))),
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
          .limit_up = parameter(args.activation.limit_up),
          .multiplier = parameter(args.multiplier)};
}

}  // namespace narrowfloat
