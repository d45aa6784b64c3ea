// fp32 to fp32 and bf16 with canonical NaN, by AVX-512 F: text that sources for a level of vector
// instructions compile (docs/architecture.md, levels of vector instructions).
#pragma once

#include <immintrin.h>

namespace narrowfloat {

// Source: a type of an unnamed namespace, so that the names are the source's own.
template <class Source>
struct RoundAvx512 {
  static __mmask16 is_nan(__m512 x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
  // The canonical NaN of fp32 has that of bf16 in its upper half.
  static __m512i with_canonical_nan(__m512 x, __m512i bits) {
    return _mm512_mask_mov_epi32(bits, is_nan(x), _mm512_set1_epi32(0x7FFFFFFF));
  }
  static __m512i fp32(__m512 x) { return with_canonical_nan(x, _mm512_castps_si512(x)); }
  static __m256i bf16(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i last_bit = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum =
        _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), last_bit);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(with_canonical_nan(x, sum), 16));
  }
};

}  // namespace narrowfloat
