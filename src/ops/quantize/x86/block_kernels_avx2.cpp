// The kernels with AVX2, FMA and F16C.
#include <immintrin.h>

#include "ops/quantize/x86/kernel_table_text.h"

namespace narrowfloat {
namespace {

struct Avx2 {
  static constexpr int kLanes = 8;
  static constexpr bool kHasShiftedE2m1 = false;
  static constexpr bool kSplitsWords = false;
  template <int kBlock>
  static constexpr int kWordVectors = 8;
  using Floats = __m256;
  using Ints = __m256i;
  using Mask = __m256i;

  template <KernelInput kInput>
  static Floats load(const void* x, int64_t elem) {
    if constexpr (kInput == KernelInput::kF32) {
      return _mm256_loadu_ps(static_cast<const float*>(x) + elem);
    } else {
      const __m128i half =
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(x) + elem));
      if constexpr (kInput == KernelInput::kF16) {
        return _mm256_cvtph_ps(half);
      } else {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
      }
    }
  }
  static Ints load_pairs(const void* x, int64_t elem) {
    return _mm256_loadu_si256(
        reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(x) + elem));
  }
  template <KernelInput kInput>
  static Floats widen(Ints words) {
    if constexpr (kInput == KernelInput::kF16) {
      return _mm256_cvtph_ps(_mm256_castsi256_si128(words));
    } else {
      return floats(shift_left<16>(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(words))));
    }
  }
  static Floats widen_f16(Ints x) {
    const Ints halves = shift_right<16>(x);
    return _mm256_cvtph_ps(
        _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
  }
  // Words of both halves of a vector, in order.
  static __m128i lower_words(Ints x) {
    return _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  }
  template <KernelInput kInput>
  static void store_16(uint16_t* out, Floats x) {
    __m128i rounded;
    if constexpr (kInput == KernelInput::kF16) {
      rounded = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    } else {
      const Ints last_bit = bit_and(shift_right<16>(bits(x)), 1);
      const Ints sum = add(add(bits(x), ints(0x7FFF)), last_bit);
      rounded = lower_words(shift_right<16>(sum));
    }
    const __m128i mask = lower_words(shift_right<16>(is_nan(x)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                     _mm_blendv_epi8(rounded, _mm_set1_epi16(0x7FFF), mask));
  }
  static void stream_line(void* to, const void* from) {
    auto* out = static_cast<__m256i*>(to);
    const auto* in = static_cast<const __m256i*>(from);
    _mm256_stream_si256(out, _mm256_loadu_si256(in));
    _mm256_stream_si256(out + 1, _mm256_loadu_si256(in + 1));
  }
  static void finish_stream() { _mm_sfence(); }
  static Floats broadcast(const float* x) { return _mm256_broadcast_ss(x); }
  static Floats floats(float x) { return _mm256_set1_ps(x); }
  static Floats floats(Ints bits) { return _mm256_castsi256_ps(bits); }
  static Ints bits(Floats x) { return _mm256_castps_si256(x); }
  static Ints ints(int32_t x) { return _mm256_set1_epi32(x); }
  static void store(float* out, Floats x) { _mm256_storeu_ps(out, x); }
  static void store_bytes(uint8_t* out, Ints x) {
    const __m128i words =
        _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packus_epi16(words, words));
  }

  static Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
  static Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
  static Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static Floats div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
  static Floats min(Floats a, Floats b) { return _mm256_min_ps(a, b); }
  static Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
  static Floats fmsub(Floats a, Floats b, Floats c) { return _mm256_fmsub_ps(a, b, c); }
  static Floats negated(Floats x) { return _mm256_xor_ps(x, floats(-0.0F)); }
  static Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
  static Ints sub(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
  static Ints min(Ints a, Ints b) { return _mm256_min_epi32(a, b); }
  static Ints max(Ints a, Ints b) { return _mm256_max_epi32(a, b); }
  static Ints bit_and(Ints a, int32_t b) { return _mm256_and_si256(a, ints(b)); }
  template <int kBits>
  static Ints shift_right(Ints a) {
    return _mm256_srli_epi32(a, kBits);
  }
  template <int kBits>
  static Ints shift_left(Ints a) {
    return _mm256_slli_epi32(a, kBits);
  }
  static Ints shift_right_by(Ints a, Ints bits) { return _mm256_srlv_epi32(a, bits); }
  // Elements of 32 bits.
  static Ints gather(const void* table, Ints index) {
    return _mm256_i32gather_epi32(static_cast<const int*>(table), index, 4);
  }
  static constexpr unsigned int kFlushes = 0x8040;  // FTZ and DAZ.
  static unsigned int environment() { return _mm_getcsr(); }
  static void set_environment(unsigned int environment) { _mm_setcsr(environment); }
  static Ints halved(Ints a) { return _mm256_srai_epi32(a, 1); }
  static Ints to_ints(Floats x) { return _mm256_cvttps_epi32(x); }
  static Floats power_of_two(Ints exponent) {
    return floats(shift_left<23>(add(exponent, ints(127))));
  }
  static Mask none() { return _mm256_setzero_si256(); }
  static Mask either(Mask a, Mask b) { return _mm256_or_si256(a, b); }
  static bool any(Mask mask) { return _mm256_movemask_epi8(mask) != 0; }
  static Mask equal(Ints a, Ints b) { return _mm256_cmpeq_epi32(a, b); }
  static Mask greater(Ints a, Ints b) { return _mm256_cmpgt_epi32(a, b); }
  static Ints select(Mask mask, Ints yes, Ints no) { return _mm256_blendv_epi8(no, yes, mask); }
  static Mask is_greater(Floats a, Floats b) { return bits(_mm256_cmp_ps(a, b, _CMP_GT_OQ)); }
  static Mask is_less(Floats a, Floats b) { return bits(_mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
  static Mask is_nan(Floats x) { return bits(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)); }
  static Floats select(Mask mask, Floats yes, Floats no) {
    return _mm256_blendv_ps(no, yes, floats(mask));
  }

  static Ints max_words(Ints a, Ints b) { return _mm256_max_epu16(a, b); }

  // These take the lower or the higher elements of each two 128-bit lanes, in turn.
  static Ints low_16(Ints a, Ints b) { return _mm256_unpacklo_epi16(a, b); }
  static Ints high_16(Ints a, Ints b) { return _mm256_unpackhi_epi16(a, b); }
  static Ints low_32(Ints a, Ints b) { return _mm256_unpacklo_epi32(a, b); }
  static Ints high_32(Ints a, Ints b) { return _mm256_unpackhi_epi32(a, b); }
  static Ints low_64(Ints a, Ints b) { return _mm256_unpacklo_epi64(a, b); }
  static Ints high_64(Ints a, Ints b) { return _mm256_unpackhi_epi64(a, b); }

  // The first two steps stay inside 128-bit lanes, the last one combines these.
  template <int kCount, typename Combine>
  static Ints merge(Ints a, Ints b, const Combine& combine) {
    if constexpr (kCount == 2) {
      return combine(low_32(a, b), high_32(a, b));
    } else if constexpr (kCount == 4) {
      return combine(low_64(a, b), high_64(a, b));
    } else {
      return combine(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
    }
  }

  template <int kBlock, typename Vectors>
  static Ints word_maxima(const Vectors& vector) {
    const Ints lanes = block_kernels::lane_maxima<Avx2, 8>(vector, 0);
    return max_words(lanes, _mm256_permute2x128_si256(lanes, lanes, 0x01));
  }

  // merge() adds the lanes 0 and 2, then 1 and 3, of 128 bits, then these. The sum of run 2v + l
  // comes in 128-bit lane l, at v.
  static Floats in_order_of_leaves(Floats x) {
    return _mm256_permutevar8x32_ps(x, _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7));
  }

  static void transpose(Ints (&rows)[kLanes]) {
    for (int i = 0; i < kLanes; i += 4) block_kernels::transpose_in_lanes<Avx2>(rows + i);
    for (int i = 0; i < 4; ++i) {
      const Ints low = _mm256_permute2x128_si256(rows[i], rows[4 + i], 0x20);
      rows[4 + i] = _mm256_permute2x128_si256(rows[i], rows[4 + i], 0x31);
      rows[i] = low;
    }
  }

  // Twice the exponent field plus the mantissa bit of the E2M1 number next to |x|, 0 for zero.
  static Ints e2m1_field(Floats x) {
    const Floats magnitude = min(floats(bit_and(bits(x), 0x7FFFFFFF)), floats(6.0F));
    // formats/e2m1_grid.h explains the rounding.
    const Floats power = _mm256_max_ps(magnitude, floats(0x1.000008p0F));
    const Floats shifted = _mm256_fmsub_ps(power, floats(0x1p22F), magnitude);
    const Floats rounded = _mm256_fmsub_ps(power, floats(0x1p22F), shifted);
    return shift_right<22>(bits(rounded));
  }

  // Four vectors as bytes with saturation. 128-bit lanes stay apart: the result has four numbers of
  // each vector, then the other four of each.
  static Ints to_bytes(Ints a, Ints b, Ints c, Ints d) {
    return _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
  }

  static void store_e2m1(const Floats (&x)[4], uint8_t* out) {
    // 250 less, the fields of 0, 1/2, 1, ... are 0, 2, 4, 5, 6, 7, 8 and 9.
    const Ints offset = _mm256_set1_epi16(250);
    const Ints low = _mm256_packs_epi32(e2m1_field(x[0]), e2m1_field(x[1]));
    const Ints high = _mm256_packs_epi32(e2m1_field(x[2]), e2m1_field(x[3]));
    const Ints fields =
        _mm256_packus_epi16(_mm256_subs_epu16(low, offset), _mm256_subs_epu16(high, offset));
    const Ints table =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0, 1, 0, 2, 3, 4, 5, 6, 7, 0, 0, 0, 0, 0, 0));
    // Saturation keeps the signs.
    const Ints signs = to_bytes(bits(x[0]), bits(x[1]), bits(x[2]), bits(x[3]));
    const Ints codes =
        _mm256_or_si256(_mm256_shuffle_epi8(table, fields),
                        _mm256_and_si256(_mm256_srli_epi16(signs, 4), _mm256_set1_epi8(8)));
    // Even codes plus 16 times odd ones.
    const Ints pairs = _mm256_maddubs_epi16(codes, _mm256_set1_epi16(0x1001));
    const Ints packed = _mm256_packus_epi16(pairs, pairs);
    // Each vector has two bytes in either half.
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(out),
        _mm_unpacklo_epi16(_mm256_castsi256_si128(packed), _mm256_extracti128_si256(packed, 1)));
  }

  // The magnitude's code plus 104, modulo 256 (round_to_e4m3 has the idea).
  static Ints e4m3_magnitude(Floats x) {
    const Floats clamped = min(floats(bit_and(bits(x), 0x7FFFFFFF)), floats(448.0F));
    const Ints power = max(bit_and(bits(clamped), 0x7F800000), ints(0x3C800000));
    const Ints sum = bits(_mm256_fmadd_ps(floats(power), floats(0x1p20F), clamped));
    return bit_and(add(sum, shift_right<20>(sum)), 0xFF);
  }

  static void store_e4m3(const Floats (&x)[4], uint8_t* out) {
    const Ints low = _mm256_packs_epi32(e4m3_magnitude(x[0]), e4m3_magnitude(x[1]));
    const Ints high = _mm256_packs_epi32(e4m3_magnitude(x[2]), e4m3_magnitude(x[3]));
    const Ints magnitudes = _mm256_sub_epi8(_mm256_packus_epi16(low, high), _mm256_set1_epi8(104));
    const Ints signs = to_bytes(bits(x[0]), bits(x[1]), bits(x[2]), bits(x[3]));
    const Ints codes = _mm256_or_si256(
        magnitudes, _mm256_and_si256(signs, _mm256_set1_epi8(static_cast<char>(0x80))));
    _mm256_storeu_si256(
        reinterpret_cast<__m256i*>(out),
        _mm256_permutevar8x32_epi32(codes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
  }
};

}  // namespace

const BlockKernels kBlockKernelsAvx2 = block_kernels::block_kernels_of<Avx2>();

}  // namespace narrowfloat
