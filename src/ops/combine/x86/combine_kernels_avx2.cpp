// The kernels with AVX2, FMA and F16C.
#include <immintrin.h>

#include "ops/combine/x86/combine_kernels_text.h"
#include "tensor/x86/round_text_avx2.h"

namespace narrowfloat {
namespace {

struct Source {};
using Round = RoundAvx2<Source>;

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

  template <CombineElement kElement>
  static void store(void* out, int64_t elem, Floats x) {
    if constexpr (kElement == CombineElement::kF32) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<float*>(out) + elem),
                          Round::fp32(x));
    } else {
      auto* to = reinterpret_cast<__m128i*>(static_cast<uint16_t*>(out) + elem);
      if constexpr (kElement == CombineElement::kBf16) {
        _mm_storeu_si128(to, Round::bf16(x));
      } else {
        const __m128i halves = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const __m128i is_nan = Round::words(_mm256_srli_epi32(Round::is_nan(x), 16));
        _mm_storeu_si128(to, _mm_blendv_epi8(halves, _mm_set1_epi16(0x7FFF), is_nan));
      }
    }
  }
};

}  // namespace

const CombineKernels kCombineKernelsAvx2 = combine_kernels::combine_kernels_of<Avx2>();

}  // namespace narrowfloat
