// The kernels with AVX-512 F, VL and DQ.
#include <immintrin.h>

#include "layers/x86/error_kernels_text.h"

namespace narrowfloat {
namespace {

struct Avx512 {
  static constexpr int kDoubles = 8;
  using Floats = __m256;
  using Doubles = __m512d;
  using Counts = __m256i;

  static Floats floats(float x) { return _mm256_set1_ps(x); }
  static Floats load_f32(const char* x) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(x));
  }
  static Floats load_bf16(const char* x) {
    const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
  }
  static Floats load_f16(const char* x) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  }

  static Counts no_counts() { return _mm256_setzero_si256(); }
  static Counts count_above(Counts counts, Floats x, Floats limit) {
    const Floats magnitude = _mm256_andnot_ps(floats(-0.0F), x);
    return count(counts, _mm256_cmp_ps_mask(magnitude, limit, _CMP_GT_OQ));
  }
  static Counts count_flushed(Counts counts, Floats x, Floats y) {
    const Floats zero = _mm256_setzero_ps();
    const __mmask8 is_nonzero = _mm256_cmp_ps_mask(x, zero, _CMP_NEQ_UQ);
    return count(counts, _mm256_mask_cmp_ps_mask(is_nonzero, y, zero, _CMP_EQ_OQ));
  }
  static Counts count(Counts counts, __mmask8 mask) {
    return _mm256_mask_add_epi32(counts, mask, counts, _mm256_set1_epi32(1));
  }
  static int64_t total(Counts counts) {
    int32_t lanes[8];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), counts);
    int64_t sum = 0;
    for (const int32_t lane : lanes) sum += lane;
    return sum;
  }

  static Doubles zero() { return _mm512_setzero_pd(); }
  static Doubles load_doubles(const double* x) { return _mm512_loadu_pd(x); }
  static void store_doubles(double* out, Doubles x) { _mm512_storeu_pd(out, x); }
  static Doubles widen(Floats x, int /*part*/) { return _mm512_cvtps_pd(x); }
  static Doubles add(Doubles a, Doubles b) { return _mm512_add_pd(a, b); }
  static Doubles sub(Doubles a, Doubles b) { return _mm512_sub_pd(a, b); }
  static Doubles mul(Doubles a, Doubles b) { return _mm512_mul_pd(a, b); }
  static Doubles max_abs(Doubles largest, Doubles x) {
    return _mm512_max_pd(largest, _mm512_andnot_pd(_mm512_set1_pd(-0.0), x));
  }
};

}  // namespace

const ErrorKernels kErrorKernelsAvx512 = error_kernels::error_kernels_of<Avx512>();

}  // namespace narrowfloat
