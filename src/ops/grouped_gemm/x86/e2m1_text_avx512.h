// Decodes strips of E2M1 codes and their scales with AVX-512 F, BW, VL, DQ and VBMI: text that
// sources for levels of vector instructions compile.
//
// Source is a type of an unnamed namespace, through which all of this has internal linkage.
#pragma once

#include <immintrin.h>

#include "formats/x86/decode_text.h"
#include "ops/grouped_gemm/x86/bf16_kernels.h"

namespace narrowfloat::e2m1_text {

// Bytes of E2M1 codes of a strip at two k.
constexpr int64_t kPairBytes = 16;

template <class Source>
struct Avx512 {
  // The vectors of decode_text.h.
  using Floats = __m512;
  using Ints = __m512i;

  static Floats floats(Ints bits) { return _mm512_castsi512_ps(bits); }
  static Ints bits(Floats x) { return _mm512_castps_si512(x); }
  static Ints ints(int32_t x) { return _mm512_set1_epi32(x); }
  static Floats floats(float x) { return _mm512_set1_ps(x); }
  static Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Ints bit_and(Ints a, int32_t b) { return _mm512_and_si512(a, ints(b)); }
  static Ints bit_or(Ints a, Ints b) { return _mm512_or_si512(a, b); }
  template <int kBits>
  static Ints shift_left(Ints a) {
    return _mm512_slli_epi32(a, kBits);
  }
  static __mmask16 equal(Ints a, Ints b) { return _mm512_cmpeq_epi32_mask(a, b); }
  static Ints select(__mmask16 mask, Ints yes, Ints no) {
    return _mm512_mask_blend_epi32(mask, no, yes);
  }

  static __m128i load_16(const uint8_t* bytes) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
  }
  // The scales of a block of 16 rows.
  static Floats decode_scales(Bf16StripScale type, const uint8_t* codes) {
    const Ints lanes = _mm512_cvtepu8_epi32(load_16(codes));
    return type == Bf16StripScale::kE4M3 ? decode_text::decode_e4m3<Avx512>(lanes)
                                         : decode_text::decode_ue8m0<Avx512>(lanes);
  }
  // Two columns of a row in every lane.
  static Ints broadcast_pair(const uint16_t* values) {
    int32_t pair = 0;
    __builtin_memcpy(&pair, values, sizeof(pair));
    return _mm512_set1_epi32(pair);
  }

  // The values of E2M1 codes in bf16. Permutations of words read five bits of an index, of which
  // the fifth is not the code's, so values stand twice.
  static Ints e2m1_values() {
    return _mm512_broadcast_i64x4(_mm256_setr_epi16(
        0, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0, static_cast<int16_t>(0x8000),
        static_cast<int16_t>(0xBF00), static_cast<int16_t>(0xBF80), static_cast<int16_t>(0xBFC0),
        static_cast<int16_t>(0xC000), static_cast<int16_t>(0xC040), static_cast<int16_t>(0xC080),
        static_cast<int16_t>(0xC0C0)));
  }
  // Times 2^exponent, but for zeros, which lose their sign.
  static Ints e2m1_values_times(int exponent) {
    constexpr __mmask32 kNotZero = 0xFEFEFEFEU;
    return _mm512_maskz_add_epi16(kNotZero, e2m1_values(),
                                  _mm512_set1_epi16(static_cast<int16_t>(exponent << 7)));
  }
  // Decodes two columns of a strip of E2M1 codes to bf16, 8 bytes each. Byte j of a column has
  // weight row 2j in its lower four bits and row 2j + 1 in its upper four.
  class E2m1Decoder {
   public:
    explicit E2m1Decoder(Ints values = e2m1_values()) : values_(values) {}

    Ints decode(const uint8_t* codes) const {
      const Ints columns = _mm512_broadcast_i32x4(load_16(codes));
      const Ints bytes = _mm512_shuffle_epi8(columns, bytes_of_lane_);
      return _mm512_permutexvar_epi16(_mm512_srlv_epi16(bytes, shift_of_word_), values_);
    }

   private:
    // Lane r gets byte r / 2 of both columns, each as a word.
    const Ints bytes_of_lane_ = _mm512_add_epi32(
        _mm512_set1_epi32(static_cast<int32_t>(0x80088000U)),
        _mm512_mullo_epi32(_mm512_set1_epi32(0x00010001),
                           _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7)));
    const Ints shift_of_word_ = _mm512_set1_epi64(0x0004000400000000);
    const Ints values_;
  };
};

}  // namespace narrowfloat::e2m1_text
