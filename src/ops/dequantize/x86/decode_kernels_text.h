// The kernels of decode_kernels.h, written against a level of vector instructions.
//
// Level is a type of an unnamed namespace with
//   kLanes                  fp32 lanes of a vector
//   Floats, Ints, Mask      vectors of fp32, of 32-bit integers, of decisions
//   decode_e2m1(packed)     kLanes values
//   load_bytes, store_*     kLanes bytes as integers; kLanes elements of an output type
//   kHasTables              whether it has store_by_tables<kBlock, kType>(codes, blocks, factors,
//                           out), faster, for kLanes blocks or fewer: false, with arbitrary
//                           results, where it does not cover a factor or a code
//   stream_line(to, from)   64 bytes to an aligned address
// and elementary operations.
#pragma once

#include "formats/x86/decode_text.h"
#include "ops/dequantize/x86/decode_kernels.h"
#include "tensor/x86/stream_text.h"

namespace narrowfloat::decode_kernels {

using decode_text::decode_e4m3;
using decode_text::decode_ue8m0;
using decode_text::kCanonicalNan;

template <class Level>
void e4m3_factors(const uint8_t* scales, int64_t blocks, float global_scale, bool divides,
                  float* factors) {
  const auto global = Level::floats(global_scale);
  for (int64_t block = 0; block < blocks; block += Level::kLanes) {
    const auto scale = decode_e4m3<Level>(Level::load_bytes(scales + block));
    Level::store_f32(factors + block,
                     divides ? Level::div(scale, global) : Level::mul(scale, global));
  }
}

template <class Level>
void ue8m0_factors(const uint8_t* scales, int64_t blocks, float* factors) {
  for (int64_t block = 0; block < blocks; block += Level::kLanes) {
    Level::store_f32(factors + block, decode_ue8m0<Level>(Level::load_bytes(scales + block)));
  }
}

// kMayBeNan: whether a value may be NaN, which is stored as the type's canonical one.
template <class Level, DecodedType kType, bool kMayBeNan>
void store(typename Level::Floats values, uint8_t* out, int64_t elem) {
  const auto or_nan = [&](typename Level::Ints number, int32_t nan) {
    if constexpr (!kMayBeNan) return number;
    return Level::select(Level::unordered(values), Level::ints(nan), number);
  };
  const auto bits = Level::bits(values);
  if constexpr (kType == DecodedType::kBf16) {
    const auto odd = Level::bit_and(Level::template shift_right<16>(bits), 1);
    const auto rounded =
        Level::template shift_right<16>(Level::add(bits, Level::add(odd, Level::ints(0x7FFF))));
    Level::store_words(out + 2 * elem, or_nan(rounded, 0x7FFF));
  } else if constexpr (kType == DecodedType::kF16) {
    Level::store_f16(out + 2 * elem, Level::floats(or_nan(bits, kCanonicalNan)));
  } else {
    Level::store_f32(out + 4 * elem, Level::floats(or_nan(bits, kCanonicalNan)));
  }
}

constexpr bool is_e2m1(DecodedBlock block) {
  return block == DecodedBlock::kE2M1Of16 || block == DecodedBlock::kE2M1Of32;
}
constexpr int64_t cols(DecodedBlock block) {
  if (block == DecodedBlock::kE2M1Of16) return 16;
  return block == DecodedBlock::kE4M3Of128 ? 128 : 32;
}
constexpr int64_t value_bytes(DecodedType type) { return type == DecodedType::kF32 ? 4 : 2; }

template <class Level, DecodedBlock kBlock, DecodedType kType, bool kMayBeNan>
void block_values_of(const uint8_t* codes, int64_t blocks, const float* factors, uint8_t* out) {
  constexpr int64_t kCols = cols(kBlock);
  for (int64_t block = 0; block < blocks; ++block) {
    const auto factor = Level::broadcast(factors + block);
    for (int64_t elem = block * kCols; elem < (block + 1) * kCols; elem += Level::kLanes) {
      if constexpr (is_e2m1(kBlock)) {
        store<Level, kType, kMayBeNan>(Level::mul(Level::decode_e2m1(codes + elem / 2), factor),
                                       out, elem);
      } else {
        const auto value = decode_e4m3<Level>(Level::load_bytes(codes + elem));
        store<Level, kType, kMayBeNan>(Level::mul(value, factor), out, elem);
      }
    }
  }
}

// The values of blocks with any factors.
template <class Level, DecodedBlock kBlock, DecodedType kType>
void any_values(const uint8_t* codes, int64_t blocks, const float* factors, uint8_t* out) {
  // E2M1 has no NaN: a value is NaN only with a factor that is, or that is infinite.
  if constexpr (is_e2m1(kBlock)) {
    constexpr uint32_t kInfinity = 0x7F800000;
    uint32_t num_others = 0;
    for (int64_t i = 0; i < blocks; ++i) {
      num_others += (__builtin_bit_cast(uint32_t, factors[i]) & kInfinity) == kInfinity ? 1U : 0U;
    }
    if (num_others == 0) {
      return block_values_of<Level, kBlock, kType, false>(codes, blocks, factors, out);
    }
  }
  block_values_of<Level, kBlock, kType, true>(codes, blocks, factors, out);
}

template <class Level, DecodedBlock kBlock, DecodedType kType>
void block_values(const uint8_t* codes, int64_t blocks, const float* factors, void* values) {
  auto* out = static_cast<uint8_t*>(values);
  if constexpr (Level::kHasTables) {
    constexpr int64_t kBlockCodes = is_e2m1(kBlock) ? cols(kBlock) / 2 : cols(kBlock);
    for (int64_t block = 0; block < blocks; block += Level::kLanes) {
      const int64_t left = blocks - block;
      const int64_t count = left < Level::kLanes ? left : Level::kLanes;
      const uint8_t* first = codes + block * kBlockCodes;
      uint8_t* to = out + block * cols(kBlock) * value_bytes(kType);
      if (!Level::template store_by_tables<kBlock, kType>(first, count, factors + block, to)) {
        any_values<Level, kBlock, kType>(first, count, factors + block, to);
      }
    }
  } else {
    any_values<Level, kBlock, kType>(codes, blocks, factors, out);
  }
}

template <class Level, DecodedBlock kBlock>
inline constexpr DecodeKernels::Values kValuesOf[3] = {
    block_values<Level, kBlock, DecodedType::kF32>, block_values<Level, kBlock, DecodedType::kBf16>,
    block_values<Level, kBlock, DecodedType::kF16>};

template <class Level>
constexpr DecodeKernels decode_kernels_of() {
  DecodeKernels kernels = {.e4m3_factors = e4m3_factors<Level>,
                           .ue8m0_factors = ue8m0_factors<Level>,
                           .values = {},
                           .stream = stream_text::stream<Level>,
                           .finish_stream = Level::finish_stream};
  for (int type = 0; type < 3; ++type) {
    kernels.values[0][type] = kValuesOf<Level, DecodedBlock::kE2M1Of16>[type];
    kernels.values[1][type] = kValuesOf<Level, DecodedBlock::kE2M1Of32>[type];
    kernels.values[2][type] = kValuesOf<Level, DecodedBlock::kE4M3Of32>[type];
    kernels.values[3][type] = kValuesOf<Level, DecodedBlock::kE4M3Of128>[type];
  }
  return kernels;
}

}  // namespace narrowfloat::decode_kernels
