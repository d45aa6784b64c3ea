// The kernels of block_kernels.h, written against a level of vector instructions.
//
// Level is a type of an unnamed namespace with
//   kLanes                    fp32 lanes of a vector
//   Floats, Ints, Mask        vectors of fp32, of 32-bit integers, of decisions
//   load<KernelInput>(x, i)   kLanes elements from element i on, as fp32
//   load_pairs(x, i)          2 kLanes elements of 16 bits from element i on
//   widen_f16(x)              fp32 numbers whose fp16 bits are in the upper halves of the lanes
//   widen<KernelInput>(words)  kLanes elements, given as the lower words of a vector, as fp32
//   merge<kCount>(a, b, combine)  a step of merged()
//   kWordVectors<kBlock>      how many vectors, of blocks or of two each, word_maxima() takes
//   word_maxima<kBlock>(vector)  the largest words of kLanes blocks, as the lower ones of a vector
//   transpose(rows)           of the matrix of kLanes vectors
//   store_e2m1, store_e4m3    the codes of four vectors of numbers
//   kSplitsWords              whether it also has them as store_split_*: of the even elements of 2
//                             kLanes, of the odd ones, and so on; with broadcast_two(numbers), for
//                             the lower and the upper half of a vector
//   kHasShiftedE2m1           whether there is a faster way for multipliers that are powers of two
//   stream_line, finish_stream  of tensor/x86/stream_text.h
//   gather(table, index)      elements of 32 bits
//   environment, set_environment, kFlushes   of formats/x86/fast_math_text.h
// and elementary operations. Magnitudes are compared as integers: bit patterns of non-negative
// floats have the order of the floats, and a NaN is larger than all of them.
#pragma once

#include <cstring>

#include "formats/x86/fast_math_text.h"
#include "ops/quantize/x86/block_kernels.h"
#include "tensor/x86/stream_text.h"

namespace narrowfloat::block_kernels {

inline constexpr int32_t kMagnitude = 0x7FFFFFFF;
inline constexpr int32_t kInfinity = 0x7F800000;
inline constexpr int32_t kSmallestNormal = 0x00800000;

// Elements ahead of the current one that are fetched into the cache.
inline constexpr int64_t kPrefetchElems = 2048;

constexpr int64_t element_bytes(KernelInput input) { return input == KernelInput::kF32 ? 4 : 2; }

// The largest magnitudes of a block of fp32 in each lane.
template <class Level, int kBlock>
typename Level::Ints block_magnitudes(const void* x, int64_t first) {
  const auto load = [&](int64_t elem) {
    return Level::bit_and(Level::bits(Level::template load<KernelInput::kF32>(x, elem)),
                          kMagnitude);
  };
  typename Level::Ints largest = load(first);
  for (int i = Level::kLanes; i < kBlock; i += Level::kLanes) {
    largest = Level::max(largest, load(first + i));
  }
  return largest;
}

// Lane j: all lanes of vector(first + j) combined, for kCount = kLanes vectors. Level::merge halves
// the number of vectors: for kCount vectors, the result has kLanes / kCount lanes of each.
template <class Level, int kCount, typename Vectors, typename Combine>
typename Level::Ints merged(const Vectors& vector, int64_t first, const Combine& combine) {
  if constexpr (kCount == 1) {
    return vector(first);
  } else {
    return Level::template merge<kCount>(
        merged<Level, kCount / 2>(vector, first, combine),
        merged<Level, kCount / 2>(vector, first + kCount / 2, combine), combine);
  }
}

// Transposes the 4x4 matrices of 32-bit lanes in each 128 bits of four vectors.
template <class Level>
void transpose_in_lanes(typename Level::Ints* rows) {
  const auto low_01 = Level::low_32(rows[0], rows[1]);
  const auto high_01 = Level::high_32(rows[0], rows[1]);
  const auto low_23 = Level::low_32(rows[2], rows[3]);
  const auto high_23 = Level::high_32(rows[2], rows[3]);
  rows[0] = Level::low_64(low_01, low_23);
  rows[1] = Level::high_64(low_01, low_23);
  rows[2] = Level::low_64(high_01, high_23);
  rows[3] = Level::high_64(high_01, high_23);
}

// The maxima of kLanes blocks from block `block` on; those from `blocks` on are 0.
template <class Level, int kBlock>
typename Level::Ints maxima_of_f32(const void* x, int64_t block, int64_t blocks) {
  const auto magnitudes = [&](int64_t i) { return block_magnitudes<Level, kBlock>(x, i * kBlock); };
  const auto magnitudes_or_zero = [&](int64_t i) {
    return i < blocks ? magnitudes(i) : Level::ints(0);
  };
  const auto larger = [](typename Level::Ints a, typename Level::Ints b) {
    return Level::max(a, b);
  };
  return block + Level::kLanes <= blocks
             ? merged<Level, Level::kLanes>(magnitudes, block, larger)
             : merged<Level, Level::kLanes>(magnitudes_or_zero, block, larger);
}

// Word j of each 128 bits: the largest of those in vector(first + j), for kCount = 8 vectors. Words
// meet in their own 128 bits.
template <class Level, int kCount, typename Vectors>
typename Level::Ints lane_maxima(const Vectors& vector, int64_t first) {
  if constexpr (kCount == 1) {
    return vector(first);
  } else {
    const auto a = lane_maxima<Level, kCount / 2>(vector, first);
    const auto b = lane_maxima<Level, kCount / 2>(vector, first + kCount / 2);
    if constexpr (kCount == 2) {
      return Level::max_words(Level::low_16(a, b), Level::high_16(a, b));
    } else if constexpr (kCount == 4) {
      return Level::max_words(Level::low_32(a, b), Level::high_32(a, b));
    } else {
      return Level::max_words(Level::low_64(a, b), Level::high_64(a, b));
    }
  }
}

// 2 kLanes words from `elem` on; those from `elems` on are 0.
template <class Level>
typename Level::Ints load_pairs_or_zero(const void* x, int64_t elem, int64_t elems) {
  constexpr int64_t kPair = 2 * Level::kLanes;
  if (elem + kPair <= elems) return Level::load_pairs(x, elem);
  uint16_t padded[kPair] = {};
  if (elem < elems) {
    std::memcpy(padded, static_cast<const uint16_t*>(x) + elem,
                static_cast<size_t>(elems - elem) * sizeof(uint16_t));
  }
  return Level::load_pairs(padded, 0);
}

// As maxima_of_f32(), for elements of 16 bits: their magnitudes are compared as words.
template <class Level, KernelInput kInput, int kBlock>
typename Level::Ints maxima_of_words(const void* x, int64_t block, int64_t blocks) {
  constexpr int64_t kPair = 2 * Level::kLanes;
  constexpr int64_t kElems = Level::kLanes * kBlock / Level::template kWordVectors<kBlock>;
  const auto magnitudes = [&](int64_t i) {
    const int64_t first = block * kBlock + i * kElems;
    auto largest = Level::bit_and(Level::load_pairs(x, first), 0x7FFF7FFF);
    for (int64_t elem = kPair; elem < kElems; elem += kPair) {
      largest =
          Level::max_words(largest, Level::bit_and(Level::load_pairs(x, first + elem), 0x7FFF7FFF));
    }
    return largest;
  };
  const auto magnitudes_or_zero = [&](int64_t i) {
    const int64_t first = block * kBlock + i * kElems;
    if (first + kElems <= blocks * kBlock) return magnitudes(i);
    if (first >= blocks * kBlock) return Level::ints(0);
    // One block of two.
    return Level::bit_and(load_pairs_or_zero<Level>(x, first, blocks * kBlock), 0x7FFF7FFF);
  };
  const auto words = block + Level::kLanes <= blocks
                         ? Level::template word_maxima<kBlock>(magnitudes)
                         : Level::template word_maxima<kBlock>(magnitudes_or_zero);
  return Level::bits(Level::template widen<kInput>(words));
}

template <class Level, KernelInput kInput, int kBlock>
bool block_maxima(const void* x, int64_t blocks, float* maxima) {
  auto largest = Level::ints(0);
  for (int64_t block = 0; block < blocks; block += Level::kLanes) {
    auto result = Level::ints(0);
    if constexpr (kInput == KernelInput::kF32) {
      result = maxima_of_f32<Level, kBlock>(x, block, blocks);
    } else {
      result = maxima_of_words<Level, kInput, kBlock>(x, block, blocks);
    }
    largest = Level::max(largest, result);
    Level::store(maxima + block, Level::floats(result));
  }
  return !Level::any(Level::greater(largest, Level::ints(kInfinity - 1)));
}

// Calls store(elem, count) for steps of four vectors: for all elements of whole steps, then with
// the rest's number.
template <class Level, KernelInput kInput, typename Store>
void for_each_step(const void* x, int64_t elems, const Store& store) {
  constexpr int64_t kStep = 4 * Level::kLanes;
  constexpr int64_t kBytes = element_bytes(kInput);
  int64_t elem = 0;
  for (; elem + kStep <= elems; elem += kStep) {
    // The next segment of the row: its maxima are read at the speed of the caches while this one's
    // codes keep the arithmetic units busy.
    for (int64_t byte = 0; byte < kStep * kBytes; byte += 64) {
      __builtin_prefetch(static_cast<const char*>(x) + (elem + kPrefetchElems) * kBytes + byte);
    }
    store(elem, kStep);
  }
  if (elem < elems) store(elem, elems - elem);
}

// Stores the codes of `count` elements, kStep or fewer: kStore(codes of a whole step).
template <int kStepBytes, typename Store>
void store_bytes_of_step(uint8_t* out, int64_t bytes, const Store& store) {
  if (bytes == kStepBytes) return store(out);
  uint8_t step[kStepBytes];
  store(step);
  std::memcpy(out, step, static_cast<size_t>(bytes));
}

// The products of 2 kLanes elements of bf16, and of as many more, with the multipliers of their
// blocks: those of even elements, then of odd ones. Elements from `elems` on count as 0.
template <class Level, int64_t kBlock>
void split_products(const void* x, int64_t elem, int64_t elems, const float* multipliers,
                    typename Level::Floats (&products)[4]) {
  constexpr int64_t kPair = 2 * Level::kLanes;
  for (int64_t i = 0; i < 2; ++i) {
    const int64_t at = elem + i * kPair;
    const auto words = load_pairs_or_zero<Level>(x, at, elems);
    const float* of_block = multipliers + at / kBlock;
    const auto factor =
        kBlock < kPair ? Level::broadcast_two(of_block) : Level::broadcast(of_block);
    products[2 * i] = Level::mul(Level::floats(Level::template shift_left<16>(words)), factor);
    products[2 * i + 1] =
        Level::mul(Level::floats(Level::bit_and(words, static_cast<int32_t>(0xFFFF0000))), factor);
  }
}

template <class Level, KernelInput kInput, KernelCodes kCodes>
void block_codes(const void* x, int64_t blocks, const float* multipliers, uint8_t* codes) {
  constexpr int64_t kBlock = kCodes == KernelCodes::kE2M1Of16    ? 16
                             : kCodes == KernelCodes::kE4M3Of128 ? 128
                                                                 : 32;
  constexpr bool kIsE2m1 = kCodes == KernelCodes::kE2M1Of16 || kCodes == KernelCodes::kE2M1Of32;
  constexpr int kLanes = Level::kLanes;
  using Floats = typename Level::Floats;
  if constexpr (kCodes == KernelCodes::kE2M1Of32 && Level::kHasShiftedE2m1) {
    if (Level::template store_shifted_e2m1<kInput>(x, blocks, multipliers, codes)) return;
  }
  // Even and odd elements of bf16 apart are wider by one operation each.
  constexpr bool kIsSplit = kInput == KernelInput::kBf16 && Level::kSplitsWords;
  const int64_t elems = blocks * kBlock;
  for_each_step<Level, kInput>(x, elems, [&](int64_t elem, int64_t count) {
    const auto scaled = [&](int i) {
      const int64_t at = elem + i * kLanes;
      if (i * kLanes >= count) return Level::floats(0.0F);
      return Level::mul(Level::template load<kInput>(x, at),
                        Level::broadcast(multipliers + at / kBlock));
    };
    Floats values[4];
    if constexpr (kIsSplit) {
      split_products<Level, kBlock>(x, elem, elem + count, multipliers, values);
    } else {
      for (int i = 0; i < 4; ++i) values[i] = scaled(i);
    }
    if constexpr (kIsE2m1) {
      store_bytes_of_step<2 * kLanes>(codes + elem / 2, count / 2, [&](uint8_t* out) {
        if constexpr (kIsSplit) return Level::store_split_e2m1(values, out);
        Level::store_e2m1(values, out);
      });
    } else {
      store_bytes_of_step<4 * kLanes>(codes + elem, count, [&](uint8_t* out) {
        if constexpr (kIsSplit) return Level::store_split_e4m3(values, out);
        Level::store_e4m3(values, out);
      });
    }
  });
}

// E4M3 codes of numbers >= 0, and their values.
template <class Level>
struct RoundedE4m3 {
  typename Level::Ints codes;
  typename Level::Floats values;
};

// The sum with 2^20 times the number's power of two has a unit of an eighth of that power of two,
// so the addition rounds to three mantissa bits, and the sum's own mantissa ends in the code's.
template <class Level>
RoundedE4m3<Level> round_to_e4m3(typename Level::Floats x) {
  constexpr int32_t kMinNormal = 0x3C800000;  // 2^-6
  const auto clamped = Level::bits(Level::min(x, Level::floats(448.0F)));
  const auto power = Level::max(Level::bit_and(clamped, kInfinity), Level::ints(kMinNormal));
  const auto shift = Level::mul(Level::floats(power), Level::floats(0x1p20F));
  const auto sum = Level::add(Level::floats(clamped), shift);
  const auto bits = Level::bits(sum);
  // The exponent field of the sum is 141 for the smallest power of two.
  const auto code =
      Level::add(bits, Level::sub(Level::template shift_right<20>(bits), Level::ints(141 * 8)));
  return {Level::bit_and(code, 0xFF), Level::sub(sum, shift)};
}

// Whether a product could be one that `fast` flushes although it rounds to 2^-126 (spec 4.2).
template <class Level>
typename Level::Mask is_at_flush_limit(typename Level::Ints product) {
  return Level::equal(product, Level::ints(kSmallestNormal));
}

// Non-negative numbers as `fast` reads them.
template <class Level>
typename Level::Ints flush(typename Level::Ints bits) {
  return Level::select(Level::greater(Level::ints(kSmallestNormal), bits), Level::ints(0), bits);
}

template <class Level, bool kIsFast>
[[gnu::noinline]] void store_nvfp4_scales(const float* maxima, int64_t blocks,
                                          const Nvfp4ScaleRule* rule, uint8_t* scales,
                                          float* multipliers) {
  constexpr float kOneSixth = 1.0F / 6.0F;
  constexpr int32_t kLeast = kIsFast ? kSmallestNormal : 1;
  for (int64_t block = 0; block < blocks; block += Level::kLanes) {
    const auto amax = Level::template load<KernelInput::kF32>(maxima, block);
    auto unrounded = amax;
    if constexpr (kIsFast) {
      unrounded =
          Level::mul(Level::floats(rule->encode), Level::mul(amax, Level::floats(kOneSixth)));
    } else {
      unrounded = Level::mul(amax, Level::floats(rule->encode_sixth));
    }
    const auto rounded = round_to_e4m3<Level>(unrounded);
    const auto decode = Level::mul(rounded.values, Level::floats(rule->decode));
    auto reciprocal = decode;
    if constexpr (kIsFast) {
      reciprocal = fast_math_text::rcp_approx<Level>(decode);
    } else {
      reciprocal =
          Level::min(Level::div(Level::floats(1.0F), decode), Level::floats(0x1.fffffep127F));
    }
    const auto is_zero = Level::greater(Level::ints(kLeast), Level::bits(amax));
    Level::store_bytes(scales + block, rounded.codes);
    Level::store(multipliers + block,
                 Level::floats(Level::select(is_zero, Level::ints(0), Level::bits(reciprocal))));
  }
}

template <class Level>
void nvfp4_scales(const float* maxima, int64_t blocks, const Nvfp4ScaleRule& rule, uint8_t* scales,
                  float* multipliers) {
  if (rule.is_fast) {
    fast_math_text::with_flushes<Level>(store_nvfp4_scales<Level, true>, maxima, blocks, &rule,
                                        scales, multipliers);
  } else {
    store_nvfp4_scales<Level, false>(maxima, blocks, &rule, scales, multipliers);
  }
}

// Scale byte of 'up': the least power of two at or above the quotient.
template <class Level>
typename Level::Ints round_up_to_ue8m0(typename Level::Ints quotient) {
  constexpr int32_t kMantissa = 0x7FFFFF;
  constexpr int32_t kScaleOfByteZero = 0x00400000;
  const auto byte =
      Level::min(Level::template shift_right<23>(Level::add(quotient, Level::ints(kMantissa))),
                 Level::ints(254));
  return Level::select(Level::greater(quotient, Level::ints(kScaleOfByteZero)), byte,
                       Level::ints(0));
}

template <class Level>
bool mx_scales(const float* maxima, int64_t blocks, const MxScaleRule& rule, uint8_t* scales,
               float* multipliers) {
  auto uncovered = Level::none();
  const auto multiplier_of_254 = Level::ints(rule.is_fast ? 0 : 0x00400000);
  for (int64_t block = 0; block < blocks; block += Level::kLanes) {
    const auto amax = Level::bits(Level::template load<KernelInput::kF32>(maxima, block));
    auto byte = amax;
    if (rule.rounding == MxScaleRule::Rounding::kUp) {
      const auto operand = rule.is_fast ? flush<Level>(amax) : amax;
      auto quotient = Level::bits(
          Level::mul(Level::floats(operand), Level::floats(rule.reciprocal_of_largest)));
      if (rule.is_fast) {
        uncovered = Level::either(uncovered, is_at_flush_limit<Level>(quotient));
        quotient = flush<Level>(quotient);
      }
      byte = round_up_to_ue8m0<Level>(quotient);
    } else {
      const int32_t half = rule.rounding == MxScaleRule::Rounding::kEven ? rule.half_unit : 0;
      const auto exponent =
          Level::sub(Level::template shift_right<23>(Level::add(amax, Level::ints(half))),
                     Level::ints(rule.max_exponent));
      byte = Level::max(exponent, Level::ints(0));
    }
    auto multiplier = Level::template shift_left<23>(Level::sub(Level::ints(254), byte));
    multiplier = Level::select(Level::equal(byte, Level::ints(254)), multiplier_of_254, multiplier);
    if (rule.is_fast) {
      multiplier = Level::select(Level::equal(byte, Level::ints(0)), Level::ints(0), multiplier);
    }
    Level::store_bytes(scales + block, byte);
    Level::store(multipliers + block, Level::floats(multiplier));
  }
  return !Level::any(uncovered);
}

template <class Level>
bool fp8_scales(const float* maxima, int64_t blocks, const Fp8KernelRule& rule, float* scales,
                float* multipliers) {
  using Kind = Fp8KernelRule::Kind;
  const auto largest_code = Level::floats(448.0F);
  const auto one = Level::floats(1.0F);
  const auto eps = Level::bits(Level::floats(rule.eps));
  auto uncovered = Level::none();
  for (int64_t block = 0; block < blocks; block += Level::kLanes) {
    const auto found = Level::bits(Level::template load<KernelInput::kF32>(maxima, block));
    const auto amax = Level::max(found, eps);
    auto scale = one;
    auto multiplier = one;
    if (rule.kind == Kind::kAmaxDiv || rule.kind == Kind::kPow2Ceil) {
      scale = Level::div(Level::floats(amax), largest_code);
      if (rule.kind == Kind::kPow2Ceil) {
        const auto exponent =
            Level::template shift_right<23>(Level::add(Level::bits(scale), Level::ints(0x7FFFFF)));
        scale = Level::floats(Level::template shift_left<23>(
            Level::min(Level::max(exponent, Level::ints(1)), Level::ints(254))));
      }
      multiplier = Level::div(one, scale);
    } else {
      auto bits = Level::bits(Level::div(largest_code, Level::floats(amax)));
      bits = Level::select(Level::equal(bits, Level::ints(kInfinity)),
                           Level::bits(Level::floats(rule.input_max)), bits);
      bits = Level::select(Level::equal(amax, Level::ints(0)), Level::bits(one), bits);
      if (rule.kind == Kind::kReciprocalPow2) bits = Level::bit_and(bits, kInfinity);
      multiplier = Level::floats(bits);
      scale = Level::div(one, multiplier);
    }
    uncovered = Level::either(uncovered,
                              Level::greater(Level::bits(multiplier), Level::ints(kInfinity - 1)));
    Level::store(scales + block, scale);
    Level::store(multipliers + block, multiplier);
  }
  return !Level::any(uncovered);
}

}  // namespace narrowfloat::block_kernels
