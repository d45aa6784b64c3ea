// The kernels of epilogue_kernels.h with AVX2.
#include <immintrin.h>

#include "ops/grouped_gemm/x86/epilogue_kernels_text.h"

namespace narrowfloat {
namespace {

struct Avx2 {
  static constexpr int kLanes = 8;

  static __m256 floats(float x) { return _mm256_set1_ps(x); }
  static __m256 load(const float* from) { return _mm256_loadu_ps(from); }
  static __m256 mul(__m256 a, __m256 b) { return _mm256_mul_ps(a, b); }
  static __m256 add(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }

  static __m256 canonical(__m256 x) {
    const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
    return _mm256_blendv_ps(x, nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  }
  static void store(float* to, __m256 x) { _mm256_storeu_ps(to, canonical(x)); }
  static void store(uint16_t* to, __m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i last_bit = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i sum =
        _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), last_bit);
    const __m256i words = _mm256_srli_epi32(
        _mm256_blendv_epi8(sum, _mm256_set1_epi32(0x7FFFFFFF),
                           _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q))),
        16);
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(to),
        _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
  }
};

}  // namespace

const EpilogueKernels kEpilogueKernelsAvx2 = epilogue_kernels::epilogue_kernels_of<Avx2>();

}  // namespace narrowfloat
