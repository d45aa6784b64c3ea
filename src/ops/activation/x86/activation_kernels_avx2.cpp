// The kernels with AVX2 and FMA.
#include <immintrin.h>

#include "ops/activation/x86/activation_kernels_text.h"

namespace narrowfloat {
namespace {

struct Avx2 {
  static constexpr int kLanes = 8;
  using Floats = __m256;
  using Ints = __m256i;
  using Mask = __m256;

  static Floats floats(float x) { return _mm256_set1_ps(x); }
  static Floats load(const float* x) { return _mm256_loadu_ps(x); }
  static void store(float* out, Floats x) { _mm256_storeu_ps(out, x); }
  static Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
  static Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
  static Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static Floats div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
  static Floats negated(Floats x) { return _mm256_xor_ps(x, floats(-0.0F)); }
  static Ints sub(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
  static Ints halved(Ints a) { return _mm256_srai_epi32(a, 1); }
  static Ints to_ints(Floats x) { return _mm256_cvttps_epi32(x); }
  static Floats power_of_two(Ints exponent) {
    const Ints biased = _mm256_add_epi32(exponent, _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
  }
  static Mask is_greater(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
  static Mask is_less(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
  static Mask is_nan(Floats x) { return _mm256_cmp_ps(x, x, _CMP_UNORD_Q); }
  static Floats select(Mask mask, Floats yes, Floats no) { return _mm256_blendv_ps(no, yes, mask); }
};

}  // namespace

const ActivationKernels kActivationKernelsAvx2 = activation_kernels::activation_kernels_of<Avx2>();

}  // namespace narrowfloat
