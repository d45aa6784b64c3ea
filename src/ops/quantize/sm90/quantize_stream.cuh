// sm90 quantizer of rows that stream through shared memory, for operations with a statistic of a
// whole row and much arithmetic: norms, and NVFP4 per token from SiLU and smoothing. One batch of
// 16-bit tensors whose rows are all valid, whole blocks, rows of up to 16384 elements.
//
//   y = source(row), codes and scales of y's blocks (spec 6, 6.12)
//
// The grid has as many CTAs as the GPU holds, each with every n-th row and one run of 16 elements
// per thread. While a row is computed the next one arrives in shared memory (row_ring.cuh), and
// values that are the same for all rows stay in registers: the weight of a norm as fp32, the
// location of a block's scale in its row, the encode scale.
//
//   wait for the row, request another | statistics, two barriers each | codes, scales, stores
//
// Bound by memory: NVFP4 from a norm moves 2.56 bytes per element, from SiLU 4.56; a norm has 18
// instructions per element (docs/kernels/quantize.md).
#pragma once

#include "ops/quantize/sm90/fast_path_blocks.cuh"
#include "ops/quantize/sm90/quantize_dense.cuh"
#include "ops/quantize/sm90/quantize_token_dense.cuh"
#include "ops/quantize/sm90/stream_sources.cuh"

namespace narrowfloat {

struct QuantizeStreamConfig {
  int max_threads;  // Threads per row.
  int registers;    // Registers per thread.
};

// The location of the scale of (row, block) in any layout: the sum of a part that depends on the
// row and one that depends on the block.
struct ScalePlaces {
  ScaleLayoutId layout;
  uint32_t row_shift;  // Rows of a tile, as a power of two.
  uint32_t row_stride;
  uint32_t low_rows;  // Mask of adjacent rows in the tile.
  uint32_t low_stride;
  uint32_t high_rows;  // Mask of rows 32 apart.
  uint32_t block_shift;
  uint32_t block_stride;
  uint32_t block_mask;

  __device__ uint32_t of_row(uint32_t row) const {
    return (row >> row_shift) * row_stride + (row & low_rows) * low_stride +
           (row / 32 & high_rows) * 4;
  }
  __device__ uint32_t of_block(uint32_t block) const {
    return (block >> block_shift) * block_stride + (block & block_mask);
  }
  __device__ bool is_swizzled() const {
    return layout == ScaleLayoutId::kSwizzled128x4 || layout == ScaleLayoutId::kSwizzled8x4;
  }
};

struct QuantizeStreamParams {
  const uint8_t* input;
  int64_t input_row_stride;  // The stride counts bytes.
  const uint8_t* vector;
  uint32_t runs_per_row;
  uint32_t num_rows;
  uint8_t* values;
  uint8_t* scales;
  ScalePlaces places;
  uint32_t blocks;  // Blocks per row.
  BlockRules rules;
  // These two are for norms.
  float cols;
  float eps;
  // The tensor's scale, as in QuantizeDenseParams; global_scale holds row scales for formats with
  // those.
  const float* device_scale;
  float host_encode;
  float e4m3_max;
  bool is_amax;
  float* global_scale;
  TokenBase base;
  const float* device_base;  // Null: `base` counts.
  ScaleTensors scale_tensors;
  ScalePadding padding;
};

// Addresses in shared memory through which the warps of a CTA exchange values: one per warp for
// each statistic, and the results of the first warp.
struct StreamShared {
  static constexpr uint32_t kWordBytes = sizeof(uint32_t);
  static constexpr uint32_t kWarpsBytes = kWarpSize * kWordBytes;
  static constexpr uint32_t kBytes = 3 * kWarpsBytes;
  static_assert(kBytes % kRingAlignment == 0);
  uint32_t sums;
  uint32_t maxima;
  uint32_t results;

  // Sums and maxima of warps that do not exist are zero.
  __device__ explicit StreamShared(uint32_t memory)
      : sums(memory), maxima(memory + kWarpsBytes), results(memory + 2 * kWarpsBytes) {
    for (uint32_t i = threadIdx.x; i < 2 * kWarpSize; i += blockDim.x) {
      store_shared(memory + i * kWordBytes, 0);
    }
    __syncthreads();
  }
};

__device__ inline void store_of_warp(uint32_t values, uint32_t value) {
  if (threadIdx.x % kWarpSize != 0) return;
  store_shared(values + threadIdx.x / kWarpSize * StreamShared::kWordBytes, value);
}
// Lane i of the first warp gets the value of warp i.
__device__ inline uint32_t load_of_warp(uint32_t values) {
  return load_shared(values + threadIdx.x * StreamShared::kWordBytes);
}

// The first warp combines the values of all warps with `make`; all warps get the result. Two
// barriers cost less than `make` in every warp.
template <class Make>
__device__ inline void let_first_warp(Make&& make) {
  __syncthreads();
  if (threadIdx.x < kWarpSize) make();
  __syncthreads();
}

// Returns 1 / rms of the row.
template <class Row>
__device__ inline float row_reciprocal_rms(const QuantizeStreamParams& params,
                                           const StreamShared& shared, const Row& h) {
  store_of_warp(shared.sums, float_bits(warp_tree_sum(sum_of_squares(h))));
  let_first_warp([&] {
    const float sum = warp_tree_sum(bits_float(load_of_warp(shared.sums)));
    if (threadIdx.x != 0) return;
    store_shared(shared.results, float_bits(reciprocal_rms(sum, params.cols, params.eps)));
  });
  return bits_float(load_shared(shared.results));
}

// Returns the factors of a row of a format with row scales; stores the row's scale. number: the
// largest of the thread's run, 0 where there is none.
template <class Math>
__device__ inline ScalePair row_scale_pair(const QuantizeStreamParams& params,
                                           const StreamShared& shared, const TokenBase& base,
                                           uint32_t row, uint32_t number) {
  const uint32_t encode = shared.results + StreamShared::kWordBytes;
  const uint32_t decode = encode + StreamShared::kWordBytes;
  store_of_warp(shared.maxima, __reduce_max_sync(kFullWarp, number));
  let_first_warp([&] {
    const uint32_t amax = __reduce_max_sync(kFullWarp, load_of_warp(shared.maxima));
    const auto scale = token_row_scale<Math>(base, bits_float(amax));
    if (threadIdx.x != 0) return;
    store_shared(encode, float_bits(scale.pair.encode));
    store_shared(decode, float_bits(scale.pair.decode));
    params.global_scale[row] = canonical_nan(scale.stored);
  });
  return {bits_float(load_shared(encode)), bits_float(load_shared(decode))};
}

// The values of a thread's run that are the same for every row, and the address of the current
// row's codes.
template <BlockFormat Format>
struct StreamRun {
  using Stored = typename Format::Stored;
  static constexpr auto kLanes = static_cast<uint32_t>(Format::kBlockCols / kRowRun);
  static constexpr uint32_t kCodeBytes = kRowRun * Format::Element::kBits / 8;

  uint8_t* codes;
  uint64_t step;  // Bytes to the codes of the next row.
  Stored* scale;  // Scale of a row whose part of the location is zero.
  uint32_t pads;  // Zeros after the scale.
  bool is_inside;
  bool stores_scale;

  __device__ explicit StreamRun(const QuantizeStreamParams& params) {
    const uint32_t run = threadIdx.x;
    const uint32_t block = run / kLanes;
    is_inside = run < params.runs_per_row;
    stores_scale = is_inside && run % kLanes == 0;
    const bool is_last = stores_scale && block + 1 == params.blocks;
    pads = is_last && params.places.is_swizzled() ? (0U - params.blocks) % 4 : 0U;
    const uint64_t row_bytes = uint64_t{params.runs_per_row} * kCodeBytes;
    codes = params.values + blockIdx.x * row_bytes + run * kCodeBytes;
    step = gridDim.x * row_bytes;
    scale = reinterpret_cast<Stored*>(params.scales) + params.places.of_block(block);
  }
};

template <typename Stored>
__device__ __noinline__ void store_stream_pads(Stored* place, uint32_t pads) {
#pragma unroll 1
  for (uint32_t pad = 1; pad <= pads; ++pad) place[pad] = Stored{0};
}

// The scale of a block of a 4-bit format whose decode factor is known.
template <BlockFormat Format, class Math>
__device__ inline FastPathScale<uint8_t> stream_scale(float amax, const ScalePair& pair,
                                                      const BlockRules& rules) {
  constexpr bool kIsNvfp4 = Format::kScaleType == ScaleType::kE4M3;
  if constexpr (kIsNvfp4 && Math::kMode == MathMode::kExact) {
    return fast_path_nvfp4_scale(amax, pair.encode, pair.decode);
  } else {
    return fast_path_scale<Format, Math>(amax, pair, rules);
  }
}

// Stores a run's codes and, for one lane of a block, its scale, for 4-bit formats. Fast and general
// path are one branch, unlike in fast_path_blocks.cuh: throughput counts here, not latency.
// run_largest: elements.max_or_nan().
template <BlockFormat Format, class Math, class Elements>
__device__ inline void quantize_stream_run_4(const QuantizeStreamParams& params,
                                             const Elements& elements, uint32_t run_largest,
                                             const ScalePair& pair, const StreamRun<Format>& run,
                                             uint8_t* scale) {
  constexpr int kLanes = static_cast<int>(Format::kBlockCols) / Elements::kSize;
  const float largest = bits_float(group_max<kLanes>(run_largest));
  const auto fast_path = stream_scale<Format, Math>(largest, pair, params.rules);
  Codes<typename Format::Element, Elements::kSize> codes;
  uint8_t stored = fast_path.stored;
  // The condition is uniform in the group.
  if (fast_path.is_right && is_in_e2m1_range<Math>(largest, fast_path.prescaled)) {
    codes = codes_in_range<Format, Math>(elements, fast_path.prescaled);
  } else {
    const float amax = block_amax<Format, kLanes>(elements, lanes_of_group<kLanes>());
    const auto plain = Format::template block_scale<Math>(amax, pair, params.rules);
    codes = general_codes<Format, Math>(elements, plain.multiplier);
    stored = canonical_scale(plain.stored);
  }
  if (!run.is_inside) return;
  store_codes(codes, run.codes);
  if (run.stores_scale) *scale = stored;
}

// Stores a run's codes and its block's scale for 8-bit formats.
template <BlockFormat Format, class Math, class Elements>
__device__ inline void quantize_stream_run_8(const QuantizeStreamParams& params,
                                             const Elements& elements, const StreamRun<Format>& run,
                                             typename Format::Stored* scale) {
  const auto block = fast_path_block<Format, Math>(elements, 1.0F, params.rules);
  if (!run.is_inside) return;
  store_codes(general_codes<Format, Math>(elements, block.factor), run.codes);
  if (run.stores_scale) *scale = block.stored;
  if (__builtin_expect(!block.is_right, 0)) {
    const RunTarget<typename Format::Stored> target{run.codes, run.stores_scale ? scale : nullptr};
    store_general_block<Format, Math>(elements, 1.0F, params.rules, target);
  }
}

// Returns the factors of all rows of a format without row scales; stores the tensor's decode scale.
template <BlockFormat Format, class Math>
__device__ inline ScalePair tensor_pair(const QuantizeStreamParams& params) {
  if constexpr (!Format::kHasGlobalScale || Format::kHasRowScale) return {1.0F, 1.0F};
  float encode = load_device_scale(params);
  if (params.is_amax) {
    encode = encode_scale_of_amax(encode, params.e4m3_max);
  } else if (blockIdx.x == 0 && threadIdx.x == 0) {
    store_dense_decode_scale(params, encode);
  }
  return Nvfp4::scale_pair<Math>(encode);
}

__device__ inline void clear_stream_padding(const QuantizeStreamParams& params) {
  const uint32_t pieces = params.padding.per_tensor();
#pragma unroll 1
  for (uint32_t piece = blockIdx.x * blockDim.x + threadIdx.x; piece < pieces;
       piece += gridDim.x * blockDim.x) {
    clear_padding(params.scale_tensors, params.padding, 0, piece);
  }
}

template <BlockFormat Format, class Math, class Source, class Tuning>
__global__ void __maxnreg__(Tuning::kConfig.registers)
    quantize_stream_kernel(const __grid_constant__ QuantizeStreamParams params) {
  NF_DYNAMIC_SHARED(uint4, stream_memory, kRingAlignment);
  using Stored = typename Format::Stored;
  const uint32_t memory = shared_address(stream_memory);
  const StreamShared shared(memory);
  RowRing<Source::kInputs> ring(memory + StreamShared::kBytes,
                                params.input + blockIdx.x * params.input_row_stride,
                                gridDim.x * params.input_row_stride, params.runs_per_row);
  StreamRun<Format> run(params);
  wait_for_previous_grids();
  if (blockIdx.x < params.num_rows) ring.start();
  const auto vector = Source::load_vector(params);
  ScalePair pair = tensor_pair<Format, Math>(params);
  TokenBase base{};
  if constexpr (Format::kHasRowScale) base = load_token_base(params);
  clear_stream_padding(params);
#pragma unroll 1
  for (uint32_t row = blockIdx.x; row < params.num_rows; row += gridDim.x) {
    const bool is_followed = row + gridDim.x < params.num_rows;
    ring.advance(is_followed);
    if (!is_followed) trigger_dependent_launch();
    const auto input = Source::read(ring);
    float reciprocal_rms = 1.0F;
    if constexpr (Source::kIsNorm) reciprocal_rms = row_reciprocal_rms(params, shared, input);
    const auto elements = Source::finish(input, vector, reciprocal_rms);
    const uint32_t largest = elements.max_or_nan();
    if constexpr (Format::kHasRowScale) {
      pair = row_scale_pair<Math>(params, shared, base, row, largest_number(elements, largest));
    }
    Stored* const scale = run.scale + params.places.of_row(row);
    if constexpr (Format::Element::kBits == 4) {
      quantize_stream_run_4<Format, Math>(params, elements, largest, pair, run, scale);
    } else {
      quantize_stream_run_8<Format, Math>(params, elements, run, scale);
    }
    if (run.pads > 0) store_stream_pads(scale, run.pads);
    run.codes += run.step;
  }
}

}  // namespace narrowfloat
