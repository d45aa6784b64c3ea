// The kernels with AVX-512 F, BW and VL.
#include <immintrin.h>

#include "ops/combine/x86/combine_kernels_text.h"

namespace narrowfloat {
namespace {

struct Avx512 {
  static constexpr int kLanes = 16;
  using Floats = __m512;

  static Floats floats(float x) { return _mm512_set1_ps(x); }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }

  template <CombineElement kElement>
  static Floats load(const void* x, int64_t elem) {
    if constexpr (kElement == CombineElement::kF32) {
      return _mm512_loadu_ps(static_cast<const float*>(x) + elem);
    } else {
      const __m256i words = _mm256_loadu_si256(
          reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(x) + elem));
      if constexpr (kElement == CombineElement::kF16) return _mm512_cvtph_ps(words);
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
    }
  }

  template <CombineElement kElement>
  static void store(void* out, int64_t elem, Floats x) {
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i bits = _mm512_castps_si512(x);
    if constexpr (kElement == CombineElement::kF32) {
      _mm512_storeu_si512(static_cast<float*>(out) + elem,
                          _mm512_mask_mov_epi32(bits, is_nan, _mm512_set1_epi32(0x7FFFFFFF)));
    } else {
      __m256i rounded;
      if constexpr (kElement == CombineElement::kF16) {
        rounded = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      } else {
        const __m512i last_bit =
            _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i sum =
            _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), last_bit);
        rounded = _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16));
      }
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<uint16_t*>(out) + elem),
                          _mm256_mask_mov_epi16(rounded, is_nan, _mm256_set1_epi16(0x7FFF)));
    }
  }
};

}  // namespace

const CombineKernels kCombineKernelsAvx512 = combine_kernels::combine_kernels_of<Avx512>();

}  // namespace narrowfloat
