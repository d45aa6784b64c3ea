// The kernels with AVX-512 F, BW, VL and DQ.
#include <immintrin.h>

#include "ops/activation/x86/activation_kernels_text.h"

namespace narrowfloat {
namespace {

struct Avx512 {
  static constexpr int kLanes = 16;
  using Floats = __m512;
  using Ints = __m512i;
  using Mask = __mmask16;

  static Floats floats(float x) { return _mm512_set1_ps(x); }
  static Floats load(const float* x) { return _mm512_loadu_ps(x); }
  static void store(float* out, Floats x) { _mm512_storeu_ps(out, x); }
  static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  static Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
  static Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static Floats negated(Floats x) { return _mm512_xor_ps(x, floats(-0.0F)); }
  static Ints sub(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
  static Ints halved(Ints a) { return _mm512_srai_epi32(a, 1); }
  static Ints to_ints(Floats x) { return _mm512_cvttps_epi32(x); }
  static Floats power_of_two(Ints exponent) {
    const Ints biased = _mm512_add_epi32(exponent, _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23));
  }
  static Mask is_greater(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
  static Mask is_less(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  static Mask is_nan(Floats x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
  static Floats select(Mask mask, Floats yes, Floats no) {
    return _mm512_mask_blend_ps(mask, no, yes);
  }
};

}  // namespace

const ActivationKernels kActivationKernelsAvx512 =
    activation_kernels::activation_kernels_of<Avx512>();

}  // namespace narrowfloat
