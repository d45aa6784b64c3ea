// The kernels of epilogue_kernels.h with AVX-512 F.
#include <immintrin.h>

#include "ops/grouped_gemm/x86/epilogue_kernels_text.h"

namespace narrowfloat {
namespace {

struct Avx512 {
  static constexpr int kLanes = 16;

  static __m512 floats(float x) { return _mm512_set1_ps(x); }
  static __m512 load(const float* from) { return _mm512_loadu_ps(from); }
  static __m512 mul(__m512 a, __m512 b) { return _mm512_mul_ps(a, b); }
  static __m512 add(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }

  // NaN become the largest pattern, whose upper half is bf16's canonical NaN.
  static __m512i with_canonical_nan(__m512 x, __m512i bits) {
    return _mm512_mask_mov_epi32(bits, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q),
                                 _mm512_set1_epi32(0x7FFFFFFF));
  }
  static void store(float* to, __m512 x) {
    _mm512_storeu_si512(to, with_canonical_nan(x, _mm512_castps_si512(x)));
  }
  static void store(uint16_t* to, __m512 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i last_bit = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum =
        _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), last_bit);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                        _mm512_cvtepi32_epi16(_mm512_srli_epi32(with_canonical_nan(x, sum), 16)));
  }
};

}  // namespace

const EpilogueKernels kEpilogueKernelsAvx512 = epilogue_kernels::epilogue_kernels_of<Avx512>();

}  // namespace narrowfloat
