// The kernels with AVX2, FMA and F16C.
#include <immintrin.h>

#include "ops/combine/x86/combine_kernels_text.h"

namespace narrowfloat {
namespace {

struct Avx2 {
  static constexpr int kLanes = 8;
  using Floats = __m256;

  static Floats floats(float x) { return _mm256_set1_ps(x); }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }

  template <CombineElement kElement>
  static Floats load(const void* x, int64_t elem) {
    if constexpr (kElement == CombineElement::kF32) {
      return _mm256_loadu_ps(static_cast<const float*>(x) + elem);
    } else {
      const __m128i words =
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(x) + elem));
      if constexpr (kElement == CombineElement::kF16) return _mm256_cvtph_ps(words);
      return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
    }
  }

  // The lower words of all lanes, in order.
  static __m128i words(__m256i x) {
    return _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  }

  template <CombineElement kElement>
  static void store(void* out, int64_t elem, Floats x) {
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i bits = _mm256_castps_si256(x);
    if constexpr (kElement == CombineElement::kF32) {
      const __m256i canonical = _mm256_blendv_epi8(bits, _mm256_set1_epi32(0x7FFFFFFF), is_nan);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<float*>(out) + elem), canonical);
    } else {
      __m128i rounded;
      if constexpr (kElement == CombineElement::kF16) {
        rounded = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      } else {
        const __m256i last_bit =
            _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i sum =
            _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), last_bit);
        rounded = words(_mm256_srli_epi32(sum, 16));
      }
      _mm_storeu_si128(
          reinterpret_cast<__m128i*>(static_cast<uint16_t*>(out) + elem),
          _mm_blendv_epi8(rounded, _mm_set1_epi16(0x7FFF), words(_mm256_srli_epi32(is_nan, 16))));
    }
  }
};

}  // namespace

const CombineKernels kCombineKernelsAvx2 = combine_kernels::combine_kernels_of<Avx2>();

}  // namespace narrowfloat
