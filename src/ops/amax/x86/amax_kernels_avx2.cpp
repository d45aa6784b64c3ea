// The kernels with AVX2.
#include <immintrin.h>

#include "ops/amax/x86/amax_kernels_text.h"

namespace narrowfloat {
namespace {

struct Avx2 {
  static constexpr int kBytes = 32;
  using Ints = __m256i;

  template <typename Int>
  static Ints all(Int x) {
    return sizeof(Int) == 2 ? _mm256_set1_epi16(static_cast<int16_t>(x)) : _mm256_set1_epi32(x);
  }
  static Ints load(const void* x) { return _mm256_loadu_si256(static_cast<const __m256i*>(x)); }
  static void store(void* out, Ints x) { _mm256_storeu_si256(static_cast<__m256i*>(out), x); }
  static Ints bit_and(Ints a, Ints b) { return _mm256_and_si256(a, b); }
  template <typename Int>
  static Ints max(Ints a, Ints b) {
    return sizeof(Int) == 2 ? _mm256_max_epi16(a, b) : _mm256_max_epi32(a, b);
  }
  template <typename Int>
  static Ints up_to(Ints x, Ints limit) {
    const Ints above =
        sizeof(Int) == 2 ? _mm256_cmpgt_epi16(x, limit) : _mm256_cmpgt_epi32(x, limit);
    return _mm256_andnot_si256(above, x);
  }
};

}  // namespace

const AmaxKernels kAmaxKernelsAvx2 = amax_kernels::amax_kernels_of<Avx2>();

}  // namespace narrowfloat
