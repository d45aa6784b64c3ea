// The kernels with AVX-512 F, BW, VL and DQ.
#include <immintrin.h>

#include "ops/grouped_gemm/x86/gemm_kernels_text.h"

namespace narrowfloat {
namespace {

struct Avx512 {
  static constexpr const EpilogueKernels* kEpilogue = &kEpilogueKernelsAvx512;
  static constexpr int kLanes = 16;
  static constexpr int kRegisterRows = 12;
  using Floats = __m512;
  using Ints = __m512i;
  using Mask = __mmask16;

  static Floats broadcast(const float* x) { return _mm512_set1_ps(*x); }
  static Floats floats(float x) { return _mm512_set1_ps(x); }
  static Floats floats(Ints bits) { return _mm512_castsi512_ps(bits); }
  static Ints bits(Floats x) { return _mm512_castps_si512(x); }
  static Ints ints(int32_t x) { return _mm512_set1_epi32(x); }
  static Floats load(const float* x) { return _mm512_loadu_ps(x); }
  static void store(float* out, Floats x) { _mm512_storeu_ps(out, x); }
  static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  static Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static Floats add_product(Floats sum, Floats a, Floats b) { return add(sum, mul(a, b)); }
  static Ints bit_and(Ints a, int32_t b) { return _mm512_and_si512(a, ints(b)); }
  static Ints bit_or(Ints a, Ints b) { return _mm512_or_si512(a, b); }
  template <int kBits>
  static Ints shift_left(Ints a) {
    return _mm512_slli_epi32(a, kBits);
  }
  static Mask equal(Ints a, Ints b) { return _mm512_cmpeq_epi32_mask(a, b); }
  static Ints select(Mask mask, Ints yes, Ints no) {
    return _mm512_mask_blend_epi32(mask, no, yes);
  }

  static __m128i load_half(const void* x) {
    return _mm_loadl_epi64(static_cast<const __m128i*>(x));
  }
  static Ints load_bytes(const uint8_t* x) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  }
  static Ints load_words(const uint16_t* x) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
  }
  static Floats e2m1_values() {
    return _mm512_setr_ps(0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F,  //
                          -0.0F, -0.5F, -1.0F, -1.5F, -2.0F, -3.0F, -4.0F, -6.0F);
  }
  // A byte in each 64 bits: the shift brings its upper four bits to the odd lane. The permutation
  // reads four bits of a lane.
  static Floats decode_e2m1(const uint8_t* packed) {
    const Ints bytes = _mm512_cvtepu8_epi64(load_half(packed));
    return _mm512_permutexvar_ps(bit_or(bytes, _mm512_slli_epi64(bytes, 28)), e2m1_values());
  }

  // Two strips; the first one's bytes are in the lower lanes.
  struct Unit {
    static constexpr int kStrips = 2;
    static Ints load(const uint8_t* const* strips, int64_t byte) {
      return _mm512_cvtepu8_epi32(
          _mm_unpacklo_epi64(load_half(strips[0] + byte), load_half(strips[1] + byte)));
    }
    template <bool kOdd>
    static Floats values(Ints codes) {
      return _mm512_permutexvar_ps(kOdd ? _mm512_srli_epi32(codes, 4) : codes, e2m1_values());
    }
    template <bool kOdd>
    static Ints scales(const uint8_t* const* strips, int64_t byte) {
      const auto rows = [&](const uint8_t* strip) {
        const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(strip + byte));
        const __m128i words =
            kOdd ? _mm_srli_epi16(all, 8) : _mm_and_si128(all, _mm_set1_epi16(0xFF));
        return _mm_packus_epi16(words, words);
      };
      return _mm512_cvtepu8_epi32(_mm_unpacklo_epi64(rows(strips[0]), rows(strips[1])));
    }
  };
};

}  // namespace

const GemmKernels kGemmKernelsAvx512 = gemm_kernels::gemm_kernels_of<Avx512>();

}  // namespace narrowfloat
