// The kernels with AVX-512 F, BW and VL.
#include <immintrin.h>

#include "ops/combine/x86/combine_kernels_text.h"
#include "tensor/x86/round_text_avx512.h"

namespace narrowfloat {
namespace {

struct Source {};
using Round = RoundAvx512<Source>;

struct Avx512 {
  static constexpr int kLanes = 16;
  using Floats = __m512;

  static Floats floats(float x) { return _mm512_set1_ps(x); }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }

  template <CombineElement kElement>
  static Floats load(const void* x, int64_t elem) {
    if constexpr (kElement == CombineElement::kF32) {
      return _mm512_loadu_ps(static_cast<const float*>(x) + elem);
    } else {
      const __m256i words = _mm256_loadu_si256(
          reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(x) + elem));
      if constexpr (kElement == CombineElement::kF16) return _mm512_cvtph_ps(words);
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
    }
  }

  template <CombineElement kElement>
  static void store(void* out, int64_t elem, Floats x) {
    if constexpr (kElement == CombineElement::kF32) {
      _mm512_storeu_si512(static_cast<float*>(out) + elem, Round::fp32(x));
    } else {
      auto* to = reinterpret_cast<__m256i*>(static_cast<uint16_t*>(out) + elem);
      if constexpr (kElement == CombineElement::kBf16) {
        _mm256_storeu_si256(to, Round::bf16(x));
      } else {
        const __m256i halves = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm256_storeu_si256(
            to, _mm256_mask_mov_epi16(halves, Round::is_nan(x), _mm256_set1_epi16(0x7FFF)));
      }
    }
  }
};

}  // namespace

const CombineKernels kCombineKernelsAvx512 = combine_kernels::combine_kernels_of<Avx512>();

}  // namespace narrowfloat
