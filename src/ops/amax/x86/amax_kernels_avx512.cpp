// The kernels with AVX-512 F and BW.
#include <immintrin.h>

#include "ops/amax/x86/amax_kernels_text.h"

namespace narrowfloat {
namespace {

struct Avx512 {
  static constexpr int kBytes = 64;
  using Ints = __m512i;

  template <typename Int>
  static Ints all(Int x) {
    return sizeof(Int) == 2 ? _mm512_set1_epi16(static_cast<int16_t>(x)) : _mm512_set1_epi32(x);
  }
  static Ints load(const void* x) { return _mm512_loadu_si512(x); }
  static void store(void* out, Ints x) { _mm512_storeu_si512(out, x); }
  static Ints bit_and(Ints a, Ints b) { return _mm512_and_si512(a, b); }
  template <typename Int>
  static Ints max(Ints a, Ints b) {
    return sizeof(Int) == 2 ? _mm512_max_epi16(a, b) : _mm512_max_epi32(a, b);
  }
  template <typename Int>
  static Ints up_to(Ints x, Ints limit) {
    return sizeof(Int) == 2 ? _mm512_maskz_mov_epi16(_mm512_cmple_epi16_mask(x, limit), x)
                            : _mm512_maskz_mov_epi32(_mm512_cmple_epi32_mask(x, limit), x);
  }
};

}  // namespace

const AmaxKernels kAmaxKernelsAvx512 = amax_kernels::amax_kernels_of<Avx512>();

}  // namespace narrowfloat
