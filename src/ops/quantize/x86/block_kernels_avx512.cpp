// The kernels with AVX-512 F, BW, VL, DQ, VBMI and VNNI.
#include <immintrin.h>

#include "ops/quantize/x86/kernel_table_text.h"
#include "tensor/x86/constants_text.h"

namespace narrowfloat {
namespace {

// E2M1 codes of magnitudes, indexed by the three bits of the exponent above 2^-3, the two highest
// bits of the mantissa, and whether any other bit of it is set.
alignas(64) constexpr uint8_t kE2m1Codes[64] = {
    0, 0, 0, 0, 0, 0, 0, 0,  // below 1/4
    0, 1, 1, 1, 1, 1, 1, 1,  // 1/4 is a tie and goes to 0
    1, 1, 1, 1, 2, 2, 2, 2,  // from 1/2: 3/4 is a tie
    2, 2, 2, 3, 3, 3, 4, 4,  // from 1: 5/4 and 7/4
    4, 4, 4, 5, 5, 5, 6, 6,  // from 2
    6, 6, 6, 7, 7, 7, 7, 7,  // from 4
    7, 7, 7, 7, 7, 7, 7, 7,  //
    7, 7, 7, 7, 7, 7, 7, 7,
};

// The places of the bytes of two codes when store_e2m1_halves() has paired them: 128 bits have four
// lanes of each of the four vectors, those of the first two vectors in turn and before the others.
constexpr auto kE2m1Order = made_by<uint8_t>([](int out) {
  const int vector = out % 32 / 8;
  const int lane = out % 8 * 2;
  return lane / 4 * 16 + vector / 2 * 8 + lane % 4 * 2 + vector % 2;
});
// The same of store_e2m1_words(): 128 bits have eight elements of either half.
constexpr auto kE2m1WordOrder = made_by<uint8_t>([](int out) {
  const int elem = out % 16 * 2;
  return elem / 8 * 16 + out % 32 / 16 * 8 + elem % 8;
});
// The place of the code of a vector's lane in store_e4m3(): 128 bits have words of four lanes of
// vectors 0 and 1, in the lower bytes, and of vectors 2 and 3, in the upper ones.
constexpr int e4m3_byte(int vector, int lane) {
  return lane / 4 * 16 + vector % 2 * 8 + lane % 4 * 2 + vector / 2;
}
constexpr auto kE4m3Order =
    made_by<uint8_t>([](int elem) { return e4m3_byte(elem / 16, elem % 16); });
constexpr auto kSplitE4m3Order =
    made_by<uint8_t>([](int elem) { return e4m3_byte(elem / 32 * 2 + elem % 2, elem % 32 / 2); });

// word_maxima() has the word of a block in the first or the third 128 bits.
constexpr auto kOrderOfPairs =
    made_by<uint16_t>([](int block) { return block % 2 * 16 + block / 2 % 8; });
constexpr auto kOrderOfHalves =
    made_by<uint16_t>([](int block) { return block / 8 % 2 * 16 + block % 8; });

struct Avx512 {
  static constexpr int kLanes = 16;
  static constexpr bool kHasShiftedE2m1 = true;
  static constexpr bool kSplitsWords = true;
  template <int kBlock>
  static constexpr int kWordVectors = kBlock == 16 ? 8 : 16;
  using Floats = __m512;
  using Ints = __m512i;
  using Mask = __mmask16;

  template <KernelInput kInput>
  static Floats load(const void* x, int64_t elem) {
    if constexpr (kInput == KernelInput::kF32) {
      return _mm512_loadu_ps(static_cast<const float*>(x) + elem);
    } else {
      const __m256i half = _mm256_loadu_si256(
          reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(x) + elem));
      if constexpr (kInput == KernelInput::kF16) {
        return _mm512_cvtph_ps(half);
      } else {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
      }
    }
  }
  static Ints load_pairs(const void* x, int64_t elem) {
    return _mm512_loadu_si512(static_cast<const uint16_t*>(x) + elem);
  }
  template <KernelInput kInput>
  static Floats widen(Ints words) {
    const __m256i half = _mm512_castsi512_si256(words);
    if constexpr (kInput == KernelInput::kF16) {
      return _mm512_cvtph_ps(half);
    } else {
      return floats(shift_left<16>(_mm512_cvtepu16_epi32(half)));
    }
  }
  static Floats widen_f16(Ints x) {
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(shift_right<16>(x)));
  }
  template <KernelInput kInput>
  static void store_16(uint16_t* out, Floats x) {
    __m256i rounded;
    if constexpr (kInput == KernelInput::kF16) {
      rounded = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    } else {
      const Ints last_bit = bit_and(shift_right<16>(bits(x)), 1);
      const Ints sum = add(add(bits(x), ints(0x7FFF)), last_bit);
      rounded = _mm512_cvtepi32_epi16(shift_right<16>(sum));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                        _mm256_mask_mov_epi16(rounded, is_nan(x), _mm256_set1_epi16(0x7FFF)));
  }
  static void stream_line(void* to, const void* from) {
    _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_loadu_si512(from));
  }
  static void finish_stream() { _mm_sfence(); }
  static Floats broadcast(const float* x) { return _mm512_set1_ps(*x); }
  static Floats broadcast_two(const float* x) {
    return _mm512_mask_broadcastss_ps(broadcast(x), 0xFF00, _mm_load_ss(x + 1));
  }
  static Floats floats(float x) { return _mm512_set1_ps(x); }
  static Floats floats(Ints bits) { return _mm512_castsi512_ps(bits); }
  static Ints bits(Floats x) { return _mm512_castps_si512(x); }
  static Ints ints(int32_t x) { return _mm512_set1_epi32(x); }
  static void store(float* out, Floats x) { _mm512_storeu_ps(out, x); }
  static void store_bytes(uint8_t* out, Ints x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(x));
  }

  static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  static Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
  static Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
  static Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
  static Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static Floats fmsub(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }
  static Floats negated(Floats x) { return _mm512_xor_ps(x, floats(-0.0F)); }
  static Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
  static Ints sub(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
  static Ints min(Ints a, Ints b) { return _mm512_min_epi32(a, b); }
  static Ints max(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
  static Ints bit_and(Ints a, int32_t b) { return _mm512_and_si512(a, ints(b)); }
  template <int kBits>
  static Ints shift_right(Ints a) {
    return _mm512_srli_epi32(a, kBits);
  }
  template <int kBits>
  static Ints shift_left(Ints a) {
    return _mm512_slli_epi32(a, kBits);
  }
  static Ints shift_right_by(Ints a, Ints bits) { return _mm512_srlv_epi32(a, bits); }
  // Elements of 32 bits.
  static Ints gather(const void* table, Ints index) {
    return _mm512_i32gather_epi32(index, table, 4);
  }
  static constexpr unsigned int kFlushes = 0x8040;  // FTZ and DAZ.
  static unsigned int environment() { return _mm_getcsr(); }
  static void set_environment(unsigned int environment) { _mm_setcsr(environment); }
  static Ints halved(Ints a) { return _mm512_srai_epi32(a, 1); }
  static Ints to_ints(Floats x) { return _mm512_cvttps_epi32(x); }
  static Floats power_of_two(Ints exponent) {
    return floats(shift_left<23>(add(exponent, ints(127))));
  }
  static Mask none() { return 0; }
  static Mask either(Mask a, Mask b) { return static_cast<Mask>(a | b); }
  static bool any(Mask mask) { return mask != 0; }
  static Mask equal(Ints a, Ints b) { return _mm512_cmpeq_epi32_mask(a, b); }
  static Mask greater(Ints a, Ints b) { return _mm512_cmpgt_epi32_mask(a, b); }
  static Ints select(Mask mask, Ints yes, Ints no) {
    return _mm512_mask_blend_epi32(mask, no, yes);
  }
  static Mask is_greater(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
  static Mask is_less(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  static Mask is_nan(Floats x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
  static Floats select(Mask mask, Floats yes, Floats no) {
    return _mm512_mask_blend_ps(mask, no, yes);
  }

  static Ints max_words(Ints a, Ints b) { return _mm512_max_epu16(a, b); }

  // These take the lower or the higher elements of each two 128-bit lanes, in turn.
  static Ints low_16(Ints a, Ints b) { return _mm512_unpacklo_epi16(a, b); }
  static Ints high_16(Ints a, Ints b) { return _mm512_unpackhi_epi16(a, b); }
  static Ints low_32(Ints a, Ints b) { return _mm512_unpacklo_epi32(a, b); }
  static Ints high_32(Ints a, Ints b) { return _mm512_unpackhi_epi32(a, b); }
  static Ints low_64(Ints a, Ints b) { return _mm512_unpacklo_epi64(a, b); }
  static Ints high_64(Ints a, Ints b) { return _mm512_unpackhi_epi64(a, b); }

  // The first two steps stay inside 128-bit lanes, the others combine these.
  template <int kCount, typename Combine>
  static Ints merge(Ints a, Ints b, const Combine& combine) {
    if constexpr (kCount == 2) {
      return combine(low_32(a, b), high_32(a, b));
    } else if constexpr (kCount == 4) {
      return combine(low_64(a, b), high_64(a, b));
    } else if constexpr (kCount == 8) {
      return combine(_mm512_shuffle_i32x4(a, b, 0x44), _mm512_shuffle_i32x4(a, b, 0xEE));
    } else {
      return combine(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xDD));
    }
  }

  // Each two of the four 128-bit lanes have words of the same blocks.
  template <int kBlock, typename Vectors>
  static Ints word_maxima(const Vectors& vector) {
    Ints lanes = block_kernels::lane_maxima<Avx512, 8>(vector, 0);
    if constexpr (kBlock > 16) {
      const Ints others = block_kernels::lane_maxima<Avx512, 8>(vector, 8);
      lanes = max_words(_mm512_shuffle_i32x4(lanes, others, 0x88),
                        _mm512_shuffle_i32x4(lanes, others, 0xDD));
    }
    lanes = max_words(lanes, _mm512_shuffle_i32x4(lanes, lanes, 0xB1));
    const auto& order = kBlock > 16 ? kOrderOfHalves : kOrderOfPairs;
    return _mm512_permutexvar_epi16(_mm512_load_si512(&order), lanes);
  }

  // merge() adds the lanes 0 and 2, then 1 and 3, of 128 bits, then these in the same order. The
  // sum of run 4v + l comes in 128-bit lane l, at v.
  static Floats in_order_of_leaves(Floats x) {
    const Ints order = _mm512_setr_epi32(0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15);
    return _mm512_permutexvar_ps(order, x);
  }

  static void transpose(Ints (&rows)[kLanes]) {
    for (int i = 0; i < kLanes; i += 4) block_kernels::transpose_in_lanes<Avx512>(rows + i);
    for (int i = 0; i < 4; ++i) {
      const Ints even_low = _mm512_shuffle_i32x4(rows[i], rows[4 + i], 0x88);
      const Ints even_high = _mm512_shuffle_i32x4(rows[8 + i], rows[12 + i], 0x88);
      const Ints odd_low = _mm512_shuffle_i32x4(rows[i], rows[4 + i], 0xDD);
      const Ints odd_high = _mm512_shuffle_i32x4(rows[8 + i], rows[12 + i], 0xDD);
      rows[i] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
      rows[4 + i] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
      rows[8 + i] = _mm512_shuffle_i32x4(even_low, even_high, 0xDD);
      rows[12 + i] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xDD);
    }
  }

  // The upper 16 bits of two vectors, with bit 4 set where a lower bit of the number is set. Even
  // words are those of `a`.
  static Ints upper_halves(Ints a, Ints b) {
    const Ints rest = ints(0x1FFFFF);
    const Ints sticky = ints(0x100000);
    a = _mm512_mask_or_epi32(a, _mm512_test_epi32_mask(a, rest), a, sticky);
    b = _mm512_mask_or_epi32(b, _mm512_test_epi32_mask(b, rest), b, sticky);
    return _mm512_mask_blend_epi16(0xAAAAAAAAU, shift_right<16>(a), b);
  }

  // The indices into kE2m1Codes, if not limited. lowest: the upper half of an eighth of the block's
  // scale, in each word.
  static Ints e2m1_indices(Ints halves, Ints lowest) {
    const Ints above = _mm512_subs_epu16(bit_and(halves, 0x7FFF7FFF), lowest);
    return _mm512_srli_epi16(above, 4);
  }

  // The codes of 64 numbers, one a byte, given as words: 128 bits have those of eight words of the
  // first vector, then of the second.
  static Ints e2m1_codes(const Ints (&halves)[2], const Ints (&lowest)[2]) {
    const Ints indices = _mm512_min_epu8(
        _mm512_packus_epi16(e2m1_indices(halves[0], lowest[0]), e2m1_indices(halves[1], lowest[1])),
        _mm512_set1_epi8(63));
    const Ints magnitudes = _mm512_permutexvar_epi8(indices, _mm512_load_si512(kE2m1Codes));
    // Saturation keeps the signs.
    const Ints signs = _mm512_packs_epi16(halves[0], halves[1]);
    return _mm512_ternarylogic_epi32(magnitudes, _mm512_srli_epi16(signs, 4), _mm512_set1_epi8(8),
                                     kOrMasked);
  }

  // Stores the codes of 64 numbers, given as the upper halves of each two vectors.
  static void store_e2m1_halves(const Ints (&halves)[2], const Ints (&lowest)[2], uint8_t* out) {
    // An even element and the next one are two bytes apart.
    const Ints codes = e2m1_codes(halves, lowest);
    const Ints pairs = _mm512_or_si512(codes, _mm512_srli_epi32(codes, 12));
    const Ints packed = _mm512_permutexvar_epi8(_mm512_load_si512(&kE2m1Order), pairs);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_castsi512_si256(packed));
  }

  // 32 bf16 numbers, with bit 4 set where a lower bit is set.
  static Ints load_bf16_halves(const void* x, int64_t elem) {
    const Ints low = _mm512_set1_epi16(0xF);
    const Ints words = load_pairs(x, elem);
    return _mm512_or_si512(words, _mm512_add_epi16(_mm512_and_si512(words, low), low));
  }

  // Stores the codes of 64 numbers, given as words in their order.
  static void store_e2m1_words(const Ints (&words)[2], const Ints (&lowest)[2], uint8_t* out) {
    // Even codes plus 16 times odd ones.
    const Ints pairs = _mm512_maddubs_epi16(e2m1_codes(words, lowest), _mm512_set1_epi16(0x1001));
    const Ints packed = _mm512_permutexvar_epi8(_mm512_load_si512(&kE2m1WordOrder), pairs);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_castsi512_si256(packed));
  }

  static void store_e2m1(const Floats (&x)[4], uint8_t* out) {
    const Ints eighth = _mm512_set1_epi16(124 << 7);
    store_e2m1_halves({upper_halves(bits(x[0]), bits(x[1])), upper_halves(bits(x[2]), bits(x[3]))},
                      {eighth, eighth}, out);
  }
  static void store_split_e2m1(const Floats (&x)[4], uint8_t* out) {
    const Ints eighth = _mm512_set1_epi16(124 << 7);
    store_e2m1_words({upper_halves(bits(x[0]), bits(x[1])), upper_halves(bits(x[2]), bits(x[3]))},
                     {eighth, eighth}, out);
  }

  // A product with a power of two is exact: the exponents are subtracted instead. Returns false,
  // without a result, where a multiplier is no power of two of the middle range.
  template <KernelInput kInput>
  static bool store_shifted_e2m1(const void* x, int64_t blocks, const float* multipliers,
                                 uint8_t* codes) {
    constexpr int32_t kEighth = 124;
    constexpr int32_t kOne = 127;
    alignas(64) uint32_t lowest[kMaxKernelBlocks];
    for (int64_t block = 0; block < blocks; block += kLanes) {
      const Ints multiplier = bits(load<KernelInput::kF32>(multipliers, block));
      const Ints exponent = shift_right<23>(multiplier);
      // An eighth of the scale is a power of two from 2^-126 on; the scale is less than 2^126.
      const Ints from_largest = sub(ints(kEighth + kOne - 1), exponent);
      const Mask is_valid = static_cast<Mask>(
          _mm512_testn_epi32_mask(multiplier, ints(static_cast<int32_t>(0x807FFFFF))) &
          _mm512_cmplt_epu32_mask(from_largest, ints(248)));
      const int64_t left = blocks - block;
      const auto used = static_cast<Mask>(left < kLanes ? (1U << left) - 1U : 0xFFFFU);
      if ((is_valid & used) != used) return false;
      const Ints word = shift_left<7>(add(from_largest, ints(1)));
      _mm512_store_si512(lowest + block, _mm512_or_si512(word, shift_left<16>(word)));
    }
    block_kernels::for_each_step<Avx512, kInput>(x, blocks * 32, [&](int64_t elem, int64_t count) {
      const bool is_whole = count == 4 * kLanes;
      const auto halves = [&](int64_t at) {
        if constexpr (kInput == KernelInput::kBf16) return load_bf16_halves(x, at);
        return upper_halves(bits(load<kInput>(x, at)), bits(load<kInput>(x, at + kLanes)));
      };
      const auto lowest_of = [&](int64_t at) {
        return ints(static_cast<int32_t>(lowest[at / 32]));
      };
      block_kernels::store_bytes_of_step<2 * kLanes>(
          codes + elem / 2, count / 2, [&](uint8_t* out) {
            const Ints numbers[2] = {halves(elem), is_whole ? halves(elem + 32) : ints(0)};
            const Ints eighths[2] = {lowest_of(elem), is_whole ? lowest_of(elem + 32) : ints(0)};
            if constexpr (kInput == KernelInput::kBf16) {
              store_e2m1_words(numbers, eighths, out);
            } else {
              store_e2m1_halves(numbers, eighths, out);
            }
          });
    });
    return true;
  }

  // 16 times the magnitude's code, less 2^15 where the sign is set (round_to_e4m3 has the idea).
  static Ints e4m3_number(Floats x) {
    // The smaller magnitude and the larger one, with the first operand's sign.
    const Floats clamped = _mm512_range_ps(x, floats(448.0F), 0x2);
    const Floats power = _mm512_range_ps(
        floats(bit_and(bits(clamped), static_cast<int32_t>(0xFF800000))), floats(0x1p-6F), 0x3);
    const Ints sum = bits(_mm512_fmadd_ps(power, floats(0x1p20F), clamped));
    // The upper word has the sign and the exponent field, 141 for the smallest power of two; the
    // lower one has what the sum keeps of the number.
    return _mm512_dpwssd_epi32(ints(-141 * 128), sum, ints(0x00010010));
  }

  template <typename Order>
  static void store_e4m3_as(const Floats (&x)[4], const Order& order, uint8_t* out) {
    const Ints upper_bytes = _mm512_set1_epi16(static_cast<int16_t>(0xFF00));
    const Ints low = _mm512_packs_epi32(e4m3_number(x[0]), e4m3_number(x[1]));
    const Ints high = _mm512_packs_epi32(e4m3_number(x[2]), e4m3_number(x[3]));
    const Ints magnitudes = _mm512_ternarylogic_epi32(
        _mm512_srli_epi16(low, 4), _mm512_slli_epi16(high, 4), upper_bytes, kSelectSecond);
    const Ints signs =
        _mm512_ternarylogic_epi32(_mm512_srli_epi16(low, 8), high, upper_bytes, kSelectSecond);
    const Ints codes = _mm512_ternarylogic_epi32(
        magnitudes, signs, _mm512_set1_epi8(static_cast<char>(0x80)), kOrMasked);
    _mm512_storeu_si512(out, _mm512_permutexvar_epi8(_mm512_load_si512(&order), codes));
  }
  static void store_e4m3(const Floats (&x)[4], uint8_t* out) { store_e4m3_as(x, kE4m3Order, out); }
  static void store_split_e4m3(const Floats (&x)[4], uint8_t* out) {
    store_e4m3_as(x, kSplitE4m3Order, out);
  }
};

}  // namespace

const BlockKernels kBlockKernelsAvx512 = block_kernels::block_kernels_of<Avx512>();

}  // namespace narrowfloat
