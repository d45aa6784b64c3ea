// Device steps of the dequantizer: codes of one 16-byte output vector to fp32, the factor of a
// block, one rounding to the output type.
#pragma once

#include "base/float_ops.h"
#include "device/ptx/convert.cuh"
#include "device/ptx/packed.cuh"
#include "device/vector_io.cuh"
#include "formats/registry.h"
#include "ops/dequantize/code_pieces.h"

namespace narrowfloat {

struct F32Output {
  static constexpr int kPieceElements = 4;
  __device__ static uint4 round(const float* x) {
    return {float_bits(x[0]), float_bits(x[1]), float_bits(x[2]), float_bits(x[3])};
  }
};

struct F16Output {
  static constexpr int kPieceElements = 8;
  __device__ static uint4 round(const float* x) {
    return {to_f16x2(x[0], x[1]), to_f16x2(x[2], x[3]), to_f16x2(x[4], x[5]), to_f16x2(x[6], x[7])};
  }
};

struct Bf16Output {
  static constexpr int kPieceElements = 8;
  __device__ static uint4 round(const float* x) {
    return {to_bf16x2(x[0], x[1]), to_bf16x2(x[2], x[3]), to_bf16x2(x[4], x[5]),
            to_bf16x2(x[6], x[7])};
  }
};

__device__ inline void e4m3_pair_to_float(uint32_t pair, float& low, float& high) {
  const uint32_t halves = e4m3x2_to_f16x2(static_cast<uint16_t>(pair));
  low = f16_low_to_float(halves);
  high = f16_high_to_float(halves);
}

// The codes of one output vector as loaded.
template <typename Element, int kElements>
struct CodePiece;

template <int kElements>
struct CodePiece<E4M3, kElements> {
  static constexpr int kBytes = kElements;
  static constexpr int kWords = kElements / 4;
  uint32_t words[kWords];

  __device__ void load(const uint8_t* global_codes) {
    if constexpr (kWords == 2) {
      const auto pair = load_readonly<uint2>(global_codes);
      words[0] = pair.x;
      words[1] = pair.y;
    } else {
      words[0] = load_readonly<uint32_t>(global_codes);
    }
  }
  __device__ void decode(float* values) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      e4m3_pair_to_float(words[i], values[4 * i], values[4 * i + 1]);
      e4m3_pair_to_float(words[i] >> 16, values[4 * i + 2], values[4 * i + 3]);
    }
  }
};

template <int kElements>
struct CodePiece<E2M1, kElements> {
  static constexpr int kBytes = kElements / 2;
  uint32_t packed;

  __device__ void load(const uint8_t* global_codes) {
    if constexpr (kBytes == 4) {
      packed = load_readonly<uint32_t>(global_codes);
    } else {
      packed = load_readonly<uint16_t>(global_codes);
    }
  }
  __device__ void decode(float* values) const {
    const uint32_t even = even_codes_as_e4m3(packed);
    const uint32_t odd = odd_codes_as_e4m3(packed);
#pragma unroll
    for (int i = 0; i < kElements / 4; ++i) {
      decode_pair(even >> (16 * i), values[4 * i], values[4 * i + 2]);
      decode_pair(odd >> (16 * i), values[4 * i + 1], values[4 * i + 3]);
    }
  }

 private:
  // Multiplies by 64 while still packed: the fp32 factor could overflow instead.
  __device__ static void decode_pair(uint32_t pair, float& low, float& high) {
    constexpr uint32_t kTwice64 = 0x54005400U;
    const uint32_t halves = mul_f16x2(e4m3x2_to_f16x2(static_cast<uint16_t>(pair)), kTwice64);
    low = f16_low_to_float(halves);
    high = f16_high_to_float(halves);
  }
};

// The factor of the codes of a block (spec 7); the scale comes first.
template <BlockFormat Format>
__device__ inline float block_factor(typename Format::Stored stored, float global_scale,
                                     bool global_scale_divides) {
  if constexpr (Format::kHasGlobalScale) {
    const float scale = f16_low_to_float(e4m3x2_to_f16x2(stored));
    return global_scale_divides ? div_rn(scale, global_scale) : mul_rn(scale, global_scale);
  } else {
    return Format::decode_scale(stored, global_scale);
  }
}

template <typename Output, typename Piece>
__device__ inline uint4 dequantize_piece(const Piece& codes, float factor) {
  float values[Output::kPieceElements];
  codes.decode(values);
#pragma unroll
  for (float& value : values) value = mul_rn(value, factor);
  return Output::round(values);
}

}  // namespace narrowfloat
