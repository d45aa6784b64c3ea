// sm90 quantizer for NVFP4 per token in the usual case, with fewer instructions and registers than
// quantize_rows.cuh: one batch of a plain 16-bit tensor whose rows are all valid, whole blocks, and
// rows that fit the registers of one CTA.
//
//   row scale from max |x|, then the blocks of NVFP4 (spec 6.2)
//
// One CTA quantizes a row, a thread one or two runs of 16 elements, which are blocks. Small tensors
// are bound by the latency from the last load to the codes: one barrier, and divisions without
// branches where the row's maximum is in range. Large ones are bound by the number of rows in
// flight, which the registers limit.
//
// Bound by memory: 2.56 bytes per element.
#pragma once

#include "ops/quantize/sm90/quantize_dense.cuh"
#include "ops/quantize/sm90/row_runs.h"

namespace narrowfloat {

struct QuantizeTokenConfig {
  int runs;         // Runs per thread.
  int max_threads;  // Threads per row.
  int registers;    // Registers per thread.
};

// The base decode scale, and its reciprocal RN(1 / scale).
struct TokenBase {
  float decode;
  float encode;
};

// The base from the host or the device. Loaded early, since the codes wait for it.
template <class Params>
__device__ inline TokenBase load_token_base(const Params& params) {
  if (params.device_base == nullptr) return params.base;
  const float decode = *params.device_base;
  return {decode, div_rn(1.0F, decode)};
}

struct QuantizeTokenParams {
  const uint8_t* input;
  int64_t input_row_stride;  // The stride counts bytes.
  uint32_t runs_per_row;
  uint32_t num_rows;
  uint8_t* values;
  uint8_t* scales;
  float* row_scales;
  ScaleLayoutId layout;    // Any layout but mn_major.
  uint32_t tiles_per_row;  // Set for swizzled layouts.
  TokenBase base;
  const float* device_base;  // Null: `base` counts.
  ScaleTensors scale_tensors;
  ScalePadding padding;
};

// Nvfp4PerToken::row_scale for any maximum.
template <class Math>
__device__ __noinline__ Nvfp4PerToken::RowScale token_row_scale_any(float row_amax, float base) {
  return Nvfp4PerToken::row_scale<Math>(row_amax, base);
}

// Nvfp4PerToken::row_scale without branches for numbers in range. The quotient is IEEE's: two
// corrections of base_encode * (1 / amax), as in the division of the CUDA compiler where nothing
// under- or overflows.
template <class Math>
__device__ inline Nvfp4PerToken::RowScale token_row_scale(const TokenBase& base_scale,
                                                          float row_amax) {
  if constexpr (Math::kMode == MathMode::kExact) {
    const auto is_moderate = [](float a, float limit) { return a >= 1.0F / limit && a <= limit; };
    const float base = base_scale.encode;
    if (is_moderate(row_amax, 0x1p60F) && is_moderate(base, 0x1p30F)) {
      const float y = newton_reciprocal(row_amax);
      float encode = __fmul_rn(base, y);
      encode = __fmaf_rn(y, __fmaf_rn(-row_amax, encode, base), encode);
      encode = __fmaf_rn(y, __fmaf_rn(-row_amax, encode, base), encode);
      const float decode = newton_reciprocal(encode);
      return {decode, {encode, decode}};
    }
    return token_row_scale_any<Math>(row_amax, base_scale.decode);
  } else {
    return Nvfp4PerToken::row_scale<Math>(row_amax, base_scale.decode);
  }
}

// Stores the scale of a block, and the zeros that pad the last four of a swizzled row.
__device__ inline void store_token_scale(const QuantizeTokenParams& params, uint32_t row,
                                         uint32_t block, uint8_t scale) {
  if (params.layout == ScaleLayoutId::kLinear) {
    params.scales[row * params.runs_per_row + block] = scale;
    return;
  }
  uint8_t* place =
      params.scales + (params.layout == ScaleLayoutId::kSwizzled128x4
                           ? Swizzled128x4Layout::offset_in_tiles(row, block, params.tiles_per_row)
                           : Swizzled8x4Layout::offset_in_tiles(row, block, params.tiles_per_row));
  *place = scale;
  if (block + 1 == params.runs_per_row) {
#pragma unroll 1
    for (uint32_t pad = 1; (block + pad) % 4 != 0; ++pad) place[pad] = 0;
  }
}

// The largest number of a run; 0 where there is none. largest: elements.max_or_nan().
template <class Elements>
__device__ inline uint32_t largest_number(const Elements& elements, uint32_t largest) {
  if (largest <= kInfinityBits) return largest;
  const uint32_t number = elements.max_number();
  return number > kInfinityBits ? 0U : number;
}

template <class Half, int kRuns>
struct TokenRuns {
  PackedElements<Half, kRowRun> runs[kRuns];
};

template <int kRuns>
__device__ inline uint32_t token_run(int i) {
  return static_cast<uint32_t>(i) * blockDim.x + threadIdx.x;
}

template <class Half, class Math, int kRuns>
__device__ inline void quantize_token_runs(const QuantizeTokenParams& params, uint32_t row,
                                           const ScalePair& pair,
                                           const TokenRuns<Half, kRuns>& elements) {
#pragma unroll
  for (int i = 0; i < kRuns; ++i) {
    const uint32_t run = token_run<kRuns>(i);
    const auto block = encode_block<Nvfp4PerToken, Math>(elements.runs[i], pair, BlockRules{});
    if (run >= params.runs_per_row) continue;
    const uint32_t number = row * params.runs_per_row + run;
    store_codes(block.codes, params.values + size_t{number} * 8);
    store_token_scale(params, row, run, block.stored);
  }
}

// BaseOfHost: the base scale is a number of the host. This avoids a branch, which costs a short
// launch more than its instructions.
struct BaseOfHost {
  __device__ static TokenBase load(const QuantizeTokenParams& params) { return params.base; }
};
struct BaseOfAny {
  __device__ static TokenBase load(const QuantizeTokenParams& params) {
    return load_token_base(params);
  }
};

template <class Half, class Math, class Tuning, class Base>
__global__ void __maxnreg__(Tuning::kConfig.registers)
    quantize_token_dense_kernel(const __grid_constant__ QuantizeTokenParams params) {
  __shared__ uint32_t shared_maxima[kWarpSize];
  constexpr int kRuns = Tuning::kConfig.runs;
  const uint32_t row = blockIdx.x;
  const uint8_t* input = params.input + static_cast<int64_t>(row) * params.input_row_stride;
  wait_for_previous_grids();
  if (row >= params.num_rows) {
    const uint32_t piece = (row - params.num_rows) * blockDim.x + threadIdx.x;
    if (piece < params.padding.per_tensor())
      clear_padding(params.scale_tensors, params.padding, 0, piece);
    return;
  }
  const TokenBase base = Base::load(params);
  TokenRuns<Half, kRuns> elements{};
#pragma unroll
  for (int i = 0; i < kRuns; ++i) {
    const uint32_t run = token_run<kRuns>(i);
    using Run = PackedElements<Half, kRowRun>;
    if (run < params.runs_per_row) {
      elements.runs[i] = load_elements<Run>(input + size_t{run} * Run::kBytes);
    }
  }
  trigger_dependent_launch();
  uint32_t row_amax = 0;
#pragma unroll
  for (int i = 0; i < kRuns; ++i) {
    row_amax = max(row_amax, largest_number(elements.runs[i], elements.runs[i].max_or_nan()));
  }
  row_amax = block_max(row_amax, shared_maxima);
  const auto scale = token_row_scale<Math>(base, bits_float(row_amax));
  if (threadIdx.x == 0) params.row_scales[row] = canonical_nan(scale.stored);
  quantize_token_runs<Half, Math, kRuns>(params, row, scale.pair, elements);
}

}  // namespace narrowfloat
