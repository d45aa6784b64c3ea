// The kernels of epilogue_kernels.h with AVX2.
#include <immintrin.h>

#include "ops/grouped_gemm/x86/epilogue_kernels_text.h"
#include "tensor/x86/round_text_avx2.h"

namespace narrowfloat {
namespace {

struct Source {};
using Round = RoundAvx2<Source>;

struct Avx2 {
  static constexpr int kLanes = 8;

  static __m256 floats(float x) { return _mm256_set1_ps(x); }
  static __m256 load(const float* from) { return _mm256_loadu_ps(from); }
  static __m256 mul(__m256 a, __m256 b) { return _mm256_mul_ps(a, b); }
  static __m256 add(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }

  static void store(float* to, __m256 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), Round::fp32(x));
  }
  static void store(uint16_t* to, __m256 x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), Round::bf16(x));
  }
};

}  // namespace

const EpilogueKernels kEpilogueKernelsAvx2 = epilogue_kernels::epilogue_kernels_of<Avx2>();

}  // namespace narrowfloat
