// prepare() of the portable GEMM: weights in checkpoint order to the order of mma_image.h. A warp
// makes a chunk, each lane what it will read.
#include <algorithm>
#include <cuda_runtime.h>

#include "device/ptx/grid_dependency.cuh"
#include "device/vector_io.cuh"
#include "formats/minifloat.h"
#include "formats/ue8m0.h"
#include "ops/grouped_gemm/packed/pack_source.cuh"
#include "ops/grouped_gemm/sm80/mma_image.h"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/device_memory.h"
#include "runtime/cuda/launch.h"
#include "tensor/layouts/registry.h"

namespace narrowfloat {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;

struct MmaPrepareParams {
  const uint8_t* codes = nullptr;  // [experts][rows][cols]
  uint8_t* image = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t strips = 0;
  int64_t chunks = 0;
  int64_t num_chunks = 0;  // All experts have so many.
  // Null without block scales.
  const uint8_t* scales = nullptr;
  ScaleLayoutId layout = ScaleLayoutId::kLinear;
  ScaleExtents scale_extents{0, 0};  // One expert has these.
  int64_t scale_image = 0;           // Scales from an expert to the next.
  bool has_grid_scales = false;      // F32 of 128x128.
  ImageRows image_rows;
  uint8_t* flags = nullptr;  // MXFP4's, of experts.
};

// A chunk of a strip.
struct MmaChunk {
  int64_t expert;
  int64_t first_row;
  int64_t first_col;

  __device__ MmaChunk(const MmaPrepareParams& params, int64_t index) {
    const int64_t strip = index / params.chunks;
    expert = strip / params.strips;
    first_row = (strip - expert * params.strips) * kMmaStripRows;
    first_col = (index - strip * params.chunks) * kMmaChunkCols;
  }
};

// The code at a column, 0 outside.
template <int kBits>
__device__ uint32_t load_code(const MmaPrepareParams& params, const MmaChunk& chunk, int64_t row,
                              int64_t col) {
  if (col >= params.cols) return 0;
  const int64_t at = (chunk.expert * params.rows + row) * params.cols + col;
  if constexpr (kBits == 16) return reinterpret_cast<const uint16_t*>(params.codes)[at];
  if constexpr (kBits == 8) return params.codes[at];
  return params.codes[at / 2] >> (at % 2 * 4) & 0xFU;
}

// A block scale's byte, `outside` where there is none.
__device__ uint32_t load_scale(const MmaPrepareParams& params, const MmaChunk& chunk, int64_t row,
                               int64_t block, uint32_t outside) {
  if (block >= params.scale_extents.blocks) return outside;
  return params.scales[chunk.expert * params.scale_image +
                       AllLayouts::offset(params.layout, row, block, params.scale_extents)];
}

__device__ float load_grid_scale(const MmaPrepareParams& params, const MmaChunk& chunk,
                                 int64_t row) {
  const auto* scales = reinterpret_cast<const float*>(params.scales);
  return scales[chunk.expert * params.scale_image + AllLayouts::offset(params.layout, row / 128,
                                                                       chunk.first_col / 128,
                                                                       params.scale_extents)];
}

// The power of two of a row's chunk (moe spec 11.3).
__device__ float rounding_unit(const MmaPrepareParams& params, const MmaChunk& chunk, int64_t row) {
  uint32_t largest = 0;
  for (int block = 0; block < 8; ++block) {
    const uint32_t magnitude =
        load_scale(params, chunk, row, chunk.first_col / 16 + block, 0) & 0x7FU;
    if (magnitude != kE4m3Nan) largest = max(largest, magnitude);
  }
  return power_of_two(rounding_exponent(largest));
}

// Not inlined, for fewer registers.
__device__ __noinline__ uint32_t rounded_code(uint32_t code, uint32_t scale, float unit) {
  const float exact = __fmul_rn(E2M1::decode(static_cast<uint8_t>(code)),
                                E4M3::decode(static_cast<uint8_t>(scale)));
  return E4M3::encode(__fdiv_rn(exact, unit));
}

// The code of mma_image.h of a column.
template <MmaCoding kCoding, bool kRounds>
__device__ uint32_t image_code(const MmaPrepareParams& params, const MmaChunk& chunk, int64_t row,
                               int64_t col, float unit) {
  if constexpr (kRounds) {
    return rounded_code(load_code<4>(params, chunk, row, col),
                        load_scale(params, chunk, row, col / 16, 0), unit);
  } else {
    return load_code<mma_code_bits(kCoding)>(params, chunk, row, col);
  }
}

// The codes of eight columns of a row as the image has them, in kBits / 4 words.
template <MmaCoding kCoding, bool kRounds>
__device__ void make_eight(const MmaPrepareParams& params, const MmaChunk& chunk, int64_t row,
                           int64_t col, float unit, uint32_t* words) {
  constexpr int kBits = mma_code_bits(kCoding);
  constexpr int kWordCodes = 32 / kBits;
#pragma unroll
  for (int word = 0; word < kBits / 4; ++word) {
    words[word] = 0;
#pragma unroll
    for (int i = 0; i < kWordCodes; ++i) {
      const uint32_t code =
          image_code<kCoding, kRounds>(params, chunk, row, col + word * kWordCodes + i, unit);
      // Even columns in the lower half, odd ones in the upper.
      const uint32_t placed = kBits == 4 ? place_e2m1(code, i / 2) : code << (i / 2 * kBits);
      words[word] |= placed << (i % 2 * 16);
    }
  }
}

// Bit b: the row has a NaN code in block b of 32 columns. `words`: the lane's, 2 a block of 32
// columns; four lanes have a row.
__device__ uint32_t nan_blocks(const uint32_t (&words)[8]) {
  uint32_t blocks = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t nan = (words[i] & 0x7F7F7F7FU) + 0x01010101U;
    if ((nan & 0x80808080U) != 0) blocks |= 1U << (i / 2);
  }
  blocks |= __shfl_xor_sync(0xFFFFFFFFU, blocks, 1);
  return blocks | __shfl_xor_sync(0xFFFFFFFFU, blocks, 2);
}

template <MmaCoding kCoding, bool kRounds>
__device__ void make_chunk(const MmaPrepareParams& params, int64_t index) {
  constexpr int kPieces = mma_pieces(kCoding) / 2;  // A row has so many.
  constexpr int kEightWords = mma_code_bits(kCoding) / 4;
  const MmaChunk chunk(params, index);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint8_t* const image = params.image + index * mma_chunk_bytes(kCoding);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = mma_source_row(params.image_rows, chunk.first_row + lane / 4 * 2 + half);
    float unit = 1.0F;
    if constexpr (kRounds) unit = rounding_unit(params, chunk, row);
    uint32_t words[4 * kPieces];
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      make_eight<kCoding, kRounds>(params, chunk, row, chunk.first_col + 32 * block + lane % 4 * 8,
                                   unit, words + block * kEightWords);
    }
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const uint32_t* own = words + 4 * piece;
      if constexpr (kCoding == MmaCoding::kBf16) {
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
          store(image + ((pair / 2 * kPieces + piece) * 32 + lane) * 16 + (pair % 2 * 2 + half) * 4,
                own[pair]);
        }
      } else {
        store(image + ((half * kPieces + piece) * 32 + lane) * 16,
              uint4{own[0], own[1], own[2], own[3]});
      }
    }
    uint32_t nans = 0;
    if constexpr (kCoding == MmaCoding::kE4m3Scaled || kCoding == MmaCoding::kMxfp8) {
      nans = nan_blocks(words);
    }
    if (lane % 4 != 0) continue;
    uint8_t* const scales =
        image + mma_code_bytes(kCoding) + (lane / 4 * 2 + half) * mma_scale_bytes(kCoding);
    if constexpr (kCoding == MmaCoding::kE4m3Scaled) {
      const float scale = kRounds ? unit : load_grid_scale(params, chunk, row);
      store(scales, nans == 0 ? scale : bits_float(0x7FFFFFFFU));
    } else {
      constexpr bool kIsE4m3 = kCoding == MmaCoding::kNvfp4;
      constexpr int kBlockCols = kIsE4m3 ? 16 : 32;
      constexpr uint32_t kOne = kIsE4m3 ? 0x38 : 127;
      for (int i = 0; i < mma_scale_bytes(kCoding); ++i) {
        const int64_t block = chunk.first_col / kBlockCols + i;
        const uint32_t scale = load_scale(params, chunk, row, block, kOne);
        scales[i] = static_cast<uint8_t>((nans >> i & 1U) == 0 ? scale : UE8M0::kNanCode);
        if constexpr (kCoding == MmaCoding::kMxfp4) {
          if (scale > kMostNearScale) params.flags[chunk.expert] = 1;
        }
      }
    }
  }
}

template <MmaCoding kCoding, bool kRounds>
__global__ void __launch_bounds__(kThreads)
    make_mma_image_kernel(const __grid_constant__ MmaPrepareParams params) {
  wait_for_previous_grids();
  for (int64_t index = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; index < params.num_chunks;
       index += int64_t{gridDim.x} * kWarps) {
    make_chunk<kCoding, kRounds>(params, index);
  }
}

template <MmaCoding kCoding, bool kRounds = false>
void launch_make_mma_image(const MmaPrepareParams& params, Stream stream) {
  constexpr int64_t kMostCtas = 1 << 20;
  const auto ctas =
      static_cast<unsigned>(std::min(ceil_div(params.num_chunks, int64_t{kWarps}), kMostCtas));
  launch(make_mma_image_kernel<kCoding, kRounds>, {dim3(ctas), dim3(kThreads)}, stream, params);
}

void launch_make_mma_image(MoeMode mode, const MmaPrepareParams& params, Stream stream) {
  switch (mma_coding(mode)) {
    case MmaCoding::kBf16:
      return launch_make_mma_image<MmaCoding::kBf16>(params, stream);
    case MmaCoding::kE4m3:
      return launch_make_mma_image<MmaCoding::kE4m3>(params, stream);
    case MmaCoding::kE4m3Scaled:
      if (params.has_grid_scales) {
        return launch_make_mma_image<MmaCoding::kE4m3Scaled>(params, stream);
      }
      return launch_make_mma_image<MmaCoding::kE4m3Scaled, true>(params, stream);
    case MmaCoding::kMxfp8:
      return launch_make_mma_image<MmaCoding::kMxfp8>(params, stream);
    case MmaCoding::kMxfp4:
    case MmaCoding::kMxfp4Near:
      return launch_make_mma_image<MmaCoding::kMxfp4>(params, stream);
    case MmaCoding::kNvfp4:
      return launch_make_mma_image<MmaCoding::kNvfp4>(params, stream);
  }
}

}  // namespace

PackedWeightData make_mma_image(const GroupedGemmProblem& problem, const WeightPieces& pieces,
                                Stream stream) {
  const CudaDeviceScope scope(problem.device);
  const MmaGrid grid(problem);
  const int64_t flags_at = problem.experts * grid.expert_bytes();
  const int64_t size_bytes = flags_at + MmaGrid::flag_bytes(problem);
  const auto image = allocate_device_memory(problem.device, size_bytes);
  clear_async(image.get() + flags_at, static_cast<size_t>(size_bytes - flags_at), stream);
  for (int64_t first = 0; first < problem.experts; first += pieces.experts) {
    const WeightSource source = pieces.from(first);
    MmaPrepareParams params{.codes = source.values,
                            .image = image.get() + first * grid.expert_bytes(),
                            .rows = problem.rows,
                            .cols = problem.cols,
                            .strips = grid.strips,
                            .chunks = grid.chunks,
                            .num_chunks = pieces.experts * grid.strips * grid.chunks,
                            .image_rows = image_rows(problem),
                            .flags = image.get() + flags_at + first};
    if (source.scales.data != nullptr) {
      params.scales = static_cast<const uint8_t*>(source.scales.data);
      params.layout = source.scales.layout;
      params.scale_extents = {source.scales.rows, source.scales.blocks};
      params.scale_image = source.scales.capacity / source.scales.batch;
      params.has_grid_scales = source.scales.type == ScaleType::kF32;
    }
    launch_make_mma_image(problem.mode, params, stream);
    // The source's memory is valid until the next call.
    wait_for(problem.device, stream);
  }
  return {.bytes = image, .size_bytes = size_bytes};
}

}  // namespace narrowfloat
