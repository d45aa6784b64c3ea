// fp32 to fp32 and bf16 with canonical NaN, by AVX2: text that sources for a level of vector
// instructions compile (docs/architecture.md, levels of vector instructions).
#pragma once

#include <immintrin.h>

namespace narrowfloat {

// Source: a type of an unnamed namespace, so that the names are the source's own.
template <class Source>
struct RoundAvx2 {
  // All bits set where x is NaN.
  static __m256i is_nan(__m256 x) { return _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)); }
  // The lower words of all lanes, in order.
  static __m128i words(__m256i x) {
    return _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  }
  // The canonical NaN of fp32 has that of bf16 in its upper half.
  static __m256i with_canonical_nan(__m256 x, __m256i bits) {
    return _mm256_blendv_epi8(bits, _mm256_set1_epi32(0x7FFFFFFF), is_nan(x));
  }
  static __m256i fp32(__m256 x) { return with_canonical_nan(x, _mm256_castps_si256(x)); }
  static __m128i bf16(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i last_bit = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i sum =
        _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), last_bit);
    return words(_mm256_srli_epi32(with_canonical_nan(x, sum), 16));
  }
};

}  // namespace narrowfloat
