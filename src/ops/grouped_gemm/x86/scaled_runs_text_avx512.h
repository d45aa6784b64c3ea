// Decodes runs of 32 columns of a strip of E2M1 codes, multiplied by their block scales, to bf16 in
// tile order (amx_kernels.h), with AVX-512 F, BW, VL, DQ and VBMI: text that sources for levels of
// vector instructions compile.
//
// Source is a type of an unnamed namespace, through which all of this has internal linkage.
#pragma once

#include "ops/grouped_gemm/x86/e2m1_text_avx512.h"

namespace narrowfloat::e2m1_text {

template <class Source>
struct ScaledRuns {
  using Text = Avx512<Source>;
  static constexpr int64_t kLanes = 16;
  static constexpr int64_t kLine = 2 * kLanes;  // bf16 values
  static constexpr int64_t kHalfRunCols = 16;
  static constexpr int64_t kHalfRunBytes = 128;

  // UE8M0 scales of a block of 32 columns. The table has values that are too large by the same
  // power of two, so that a product is a difference of words, which does not go below zero.
  class PowersOfTwo {
   public:
    PowersOfTwo(const uint8_t* codes, bool /*has_second*/) {
      const __m128i bytes = Text::load_16(codes);
      const __m512i in_upper_bytes = _mm512_maskz_permutexvar_epi8(
          0xAAAAAAAAAAAAAAAAU, byte_of_lane(), _mm512_castsi128_si512(bytes));
      excess_ =
          _mm512_sub_epi16(_mm512_set1_epi16(static_cast<int16_t>((kTableExponent + kBias) << 7)),
                           _mm512_srli_epi16(in_upper_bytes, 1));
      nan_ = _mm_cmpeq_epi8_mask(bytes, _mm_set1_epi8(-1));
    }
    static __m512i values() { return Text::e2m1_values_times(kTableExponent); }
    [[nodiscard]] __m512i times(__m512i words) const { return _mm512_subs_epu16(words, excess_); }
    [[nodiscard]] __mmask16 nan() const { return nan_; }

   private:
    static __m512i byte_of_lane() {
      const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
      return _mm512_mullo_epi32(lanes, _mm512_set1_epi32(0x01010101));
    }

    // The largest with which 6 has no sign.
    static constexpr int kTableExponent = 126;
    static constexpr int kBias = 127;

    __m512i excess_;
    __mmask16 nan_;
  };

  // E4M3 scales of two blocks of 16 columns; a second one that is not there is 0.
  class E4m3Scales {
   public:
    E4m3Scales(const uint8_t* codes, bool has_second)
        : of_even_(Text::decode_scales(Bf16StripScale::kE4M3, codes)),
          of_odd_(has_second ? Text::decode_scales(Bf16StripScale::kE4M3, codes + kLanes)
                             : _mm512_setzero_ps()) {}
    static __m512i values() { return Text::e2m1_values(); }
    [[nodiscard]] __m512i times(__m512i words) const {
      const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xFFFF0000U));
      const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
      const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(words, upper));
      const __m512i even_product =
          _mm512_srli_epi32(_mm512_castps_si512(_mm512_mul_ps(even, of_even_)), 16);
      return _mm512_mask_blend_epi16(0xAAAAAAAAU, even_product,
                                     _mm512_castps_si512(_mm512_mul_ps(odd, of_odd_)));
    }
    [[nodiscard]] static __mmask16 nan() { return 0; }

   private:
    __m512 of_even_;
    __m512 of_odd_;
  };

  // Scales is one of these two.
  template <class Scales>
  class Decoder {
   public:
    // has_second: whether the run has its columns from 16 on, which else become zeros.
    [[gnu::always_inline]] void decode(const uint8_t* codes, const uint8_t* scales, bool has_second,
                                       uint16_t* out) const {
      const Scales factors(scales, has_second);
      __m512i first[2];
      __m512i second[2];
      for (int i = 0; i < 2; ++i) {
        first[i] = _mm512_loadu_si512(codes + 64 * i);
        second[i] = has_second ? _mm512_loadu_si512(codes + kHalfRunBytes + 64 * i)
                               : _mm512_setzero_si512();
      }
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        // A lane of 128 bits has an even or an odd column, and the one 16 further.
        const __m512i even = _mm512_unpacklo_epi64(first[i], second[i]);
        const __m512i odd = _mm512_unpackhi_epi64(first[i], second[i]);
#pragma GCC unroll 4
        for (int lane = 0; lane < 4; ++lane) {
          uint16_t* lines = out + (i * 4 + lane) * 2 * kLine;
          _mm512_storeu_si512(lines, factors.times(line(odd, lane)));
          _mm512_storeu_si512(lines + kLine, factors.times(line(even, lane)));
        }
      }
      if (__builtin_expect(factors.nan() != 0, 0)) {
        for (int pair = 0; pair < kLanes; ++pair) {
          _mm512_mask_storeu_epi32(out + pair * kLine, factors.nan(),
                                   _mm512_set1_epi32(0x7FFF7FFF));
        }
      }
    }

   private:
    // The codes of a 128-bit lane stand in the lower bits of words.
    [[nodiscard]] __m512i line(__m512i columns, int lane) const {
      const __m512i bytes = _mm512_permutexvar_epi8(bytes_of_lane_[lane], columns);
      return _mm512_permutexvar_epi16(_mm512_srlv_epi16(bytes, shift_of_word_), values_);
    }
    static __m512i bytes_of_lane(int lane) {
      const __m512i rows = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
      return _mm512_add_epi32(
          _mm512_set1_epi32(static_cast<int32_t>(0x08080000U) + lane * 0x10101010),
          _mm512_mullo_epi32(_mm512_set1_epi32(0x01010101), rows));
    }

    const __m512i bytes_of_lane_[4] = {bytes_of_lane(0), bytes_of_lane(1), bytes_of_lane(2),
                                       bytes_of_lane(3)};
    const __m512i shift_of_word_ = _mm512_set1_epi64(0x0004000400000000);
    const __m512i values_ = Scales::values();
  };
};

}  // namespace narrowfloat::e2m1_text
