// The kernels of epilogue_kernels.h with AVX-512 F.
#include <immintrin.h>

#include "ops/grouped_gemm/x86/epilogue_kernels_text.h"
#include "tensor/x86/round_text_avx512.h"

namespace narrowfloat {
namespace {

struct Source {};
using Round = RoundAvx512<Source>;

struct Avx512 {
  static constexpr int kLanes = 16;

  static __m512 floats(float x) { return _mm512_set1_ps(x); }
  static __m512 load(const float* from) { return _mm512_loadu_ps(from); }
  static __m512 mul(__m512 a, __m512 b) { return _mm512_mul_ps(a, b); }
  static __m512 add(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }

  static void store(float* to, __m512 x) { _mm512_storeu_si512(to, Round::fp32(x)); }
  static void store(uint16_t* to, __m512 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), Round::bf16(x));
  }
};

}  // namespace

const EpilogueKernels kEpilogueKernelsAvx512 = epilogue_kernels::epilogue_kernels_of<Avx512>();

}  // namespace narrowfloat
