// sm90_halves: numbers from NVFP4 blocks of KV caches, gathered through page tables or row by row
// (spec 7), bound by memory; and the reordering of V's scales (spec 8.8).
//
// A thread dequantizes half a block: 4 bytes of codes, one scale, one 16-byte store of a 16-bit
// type or two of fp32. A code's bits, shifted left, are an fp16 number of a 2^14th of its value;
// with that factor in the scale, code times scale is exact in fp32 and only the product with the
// decode scale rounds. blockIdx.y selects keys or values. Tokens that the tables place nowhere are
// not written.
//
// Bytes per element: 0.5625 read, 2 or 4 written. Reordering: a thread moves one scale, and
// neighbouring threads write neighbouring bytes.
#include <array>
#include <cuda_runtime.h>

#include "device/ptx/convert.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/vector_io.cuh"
#include "ops/kv_cache/kv_launch.cuh"
#include "ops/kv_cache/kv_problem.h"
#include "runtime/cuda/cuda_devices.h"

namespace narrowfloat {
namespace {

constexpr int kPiece = 8;  // Elements per thread.
constexpr int kPieceCodes = kPiece / 2;

struct KvSideParams {
  const uint8_t* values = nullptr;
  KvStrides value_steps;
  const uint8_t* scales = nullptr;
  KvStrides scale_steps;
  uint8_t* output = nullptr;
  KvStrides output_steps;
  KvFactor factor;
};

struct KvDequantizeParams {
  KvSideParams sides[kKvSides];
  KvAxes axes[kKvSides];
  KvTables tables;
  int64_t first_i = 0;
  DType output_type = DType::kBF16;
  bool looks_up = false;
};

// Multiplies eight codes by `scale`, which has the factor 2^14, and by the decode scale.
__device__ void decode_piece(uint32_t codes, float scale, float factor, float* x) {
#pragma unroll
  for (int i = 0; i < kPiece / 2; ++i) {
    const uint32_t pair = codes >> (8 * i);
    const uint32_t magnitudes = (pair & 0x7U) << 9 | (pair & 0x70U) << 21;
    const uint32_t halves = magnitudes | (pair & 0x8U) << 12 | (pair & 0x80U) << 24;
    x[2 * i] = __fmul_rn(__fmul_rn(f16_low_to_float(halves), scale), factor);
    x[2 * i + 1] = __fmul_rn(__fmul_rn(f16_high_to_float(halves), scale), factor);
  }
}

__device__ void store_piece(const float* x, DType type, uint8_t* global_output) {
  if (type == DType::kF32) {
    store(global_output, float4{x[0], x[1], x[2], x[3]});
    store(global_output + 16, float4{x[4], x[5], x[6], x[7]});
  } else if (type == DType::kBF16) {
    store(global_output, uint4{to_bf16x2(x[0], x[1]), to_bf16x2(x[2], x[3]), to_bf16x2(x[4], x[5]),
                               to_bf16x2(x[6], x[7])});
  } else {
    store(global_output, uint4{to_f16x2(x[0], x[1]), to_f16x2(x[2], x[3]), to_f16x2(x[4], x[5]),
                               to_f16x2(x[6], x[7])});
  }
}

__global__ void __launch_bounds__(kKvThreads)
    dequantize_pieces_kernel(const __grid_constant__ KvDequantizeParams params) {
  constexpr float kCodeFactor = 0x1p14F;
  const KvSideParams& side = params.sides[blockIdx.y];
  const KvAxes& axes = params.axes[blockIdx.y];
  const uint32_t thread = blockIdx.x * kKvThreads + threadIdx.x;
  if (thread >= axes.num_threads) return;
  const KvPlace place = kv_place(axes, params.first_i, thread);
  wait_for_previous_grids();
  KvEntry from{place.i, place.j};
  if (params.looks_up) from = params.tables.find(place.i, place.j);
  if (from.page < 0) return;
  const uint8_t* global_codes = side.values +
                                side.value_steps.offset(from.page, from.entry, place.k) +
                                place.piece * int64_t{kPieceCodes};
  const uint8_t* global_scale =
      side.scales + side.scale_steps.offset(from.page, from.entry, place.k) + place.piece / 2;
  const auto codes = load_readonly<uint32_t>(global_codes);
  const float scale = f16_low_to_float(e4m3x2_to_f16x2(load_readonly<uint8_t>(global_scale)));
  const float factor = side.factor.get();
  trigger_dependent_launch();
  float x[kPiece];
  decode_piece(codes, __fmul_rn(scale, kCodeFactor), factor, x);
  const int64_t width = params.output_type == DType::kF32 ? 4 : 2;
  store_piece(x, params.output_type,
              side.output + side.output_steps.offset(place.i, place.j, place.k) +
                  place.piece * (kPiece * width));
}

KvDequantizeParams make_params(const KvDequantizeProblem& problem, const KvDequantizeArgs& args) {
  KvDequantizeParams params;
  for (size_t i = 0; i < kKvSides; ++i) {
    const KvDequantizeSide& from = args.sides[i];
    KvSideParams& side = params.sides[i];
    side.values = from.values;
    side.scales = from.scales;
    side.output = from.output;
    side.factor = from.factor;
    side.value_steps = KvStrides(from.value_steps);
    side.scale_steps = KvStrides(from.scale_steps);
    side.output_steps = KvStrides(from.output_steps);
  }
  params.tables = args.tables;
  params.output_type = problem.output;
  params.looks_up = problem.looks_up;
  return params;
}

std::array<int64_t, kKvSides> pieces_of(const KvDequantizeProblem& problem) {
  return {2 * problem.blocks[0], 2 * problem.blocks[1]};
}

void launch_kv_dequantize(const KvDequantizeProblem& problem, const KvDequantizeArgs& args,
                          Stream stream) {
  const CudaDeviceScope scope(problem.device);
  launch_kv(dequantize_pieces_kernel, make_params(problem, args), problem.extents,
            pieces_of(problem), stream);
}

Support supports(const KvDequantizeProblem& problem) {
  return kv_fits(problem.extents, pieces_of(problem));
}

struct KvReorderParams {
  const uint8_t* input = nullptr;
  KvStrides input_steps;
  uint8_t* output = nullptr;
  KvStrides output_steps;
  KvAxes axes[kKvSides];
  int64_t first_i = 0;
  bool is_inverse = false;
};

// The place that the reordering moves to `to`: the inverse of reordered_v_scale().
__device__ KvScalePlace plain_v_scale(const KvScalePlace& to, int64_t blocks) {
  return {to.token / 4 * 4 + to.position % 4, to.token % 4 * (blocks / 4) + to.position / 4};
}

__global__ void __launch_bounds__(kKvThreads)
    move_v_scales_kernel(const __grid_constant__ KvReorderParams params) {
  const KvAxes& axes = params.axes[0];
  const uint32_t thread = blockIdx.x * kKvThreads + threadIdx.x;
  if (thread >= axes.num_threads) return;
  const KvPlace place = kv_place(axes, params.first_i, thread);
  const int64_t blocks = axes.pieces.divisor();
  const KvScalePlace to{place.j, place.piece};
  const KvScalePlace from = params.is_inverse ? reordered_v_scale(to.token, to.position, blocks)
                                              : plain_v_scale(to, blocks);
  wait_for_previous_grids();
  const auto scale = load_readonly<uint8_t>(
      params.input + params.input_steps.offset(place.i, from.token, place.k) + from.position);
  trigger_dependent_launch();
  params.output[params.output_steps.offset(place.i, to.token, place.k) + to.position] = scale;
}

void launch_kv_reorder(const KvReorderProblem& problem, const KvReorderArgs& args, Stream stream) {
  const CudaDeviceScope scope(problem.device);
  KvReorderParams params;
  params.input = args.input;
  params.output = args.output;
  params.input_steps = KvStrides(args.input_steps);
  params.output_steps = KvStrides(args.output_steps);
  params.is_inverse = problem.is_inverse;
  launch_kv(move_v_scales_kernel, params, {problem.pages, problem.tokens, problem.heads},
            {problem.blocks, 0}, stream);
}

Support supports_reorder(const KvReorderProblem& problem) {
  return kv_fits({problem.pages, problem.tokens, problem.heads}, {problem.blocks, 0});
}

}  // namespace

const KvDequantizeImpl kKvDequantizeSm90{"sm90_halves", on_own_code<supports>,
                                         launch_kv_dequantize};
const KvDequantizeImpl kKvDequantizeSm80{"sm80_halves", on_portable_code<supports>,
                                         launch_kv_dequantize};
const KvReorderImpl kKvReorderSm90{"sm90_scales", on_own_code<supports_reorder>, launch_kv_reorder};
const KvReorderImpl kKvReorderSm80{"sm80_scales", on_portable_code<supports_reorder>,
                                   launch_kv_reorder};

}  // namespace narrowfloat
