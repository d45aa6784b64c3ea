// The kernels with AVX2.
#include <immintrin.h>

#include "ops/grouped_gemm/x86/gemm_kernels_text.h"

namespace narrowfloat {
namespace {

struct Avx2 {
  static constexpr const EpilogueKernels* kEpilogue = &kEpilogueKernelsAvx2;
  static constexpr int kLanes = 8;
  static constexpr int kRegisterRows = 5;
  using Floats = __m256;
  using Ints = __m256i;
  using Mask = __m256i;

  static Floats broadcast(const float* x) { return _mm256_broadcast_ss(x); }
  static Floats floats(float x) { return _mm256_set1_ps(x); }
  static Floats floats(Ints bits) { return _mm256_castsi256_ps(bits); }
  static Ints bits(Floats x) { return _mm256_castps_si256(x); }
  static Ints ints(int32_t x) { return _mm256_set1_epi32(x); }
  static Floats load(const float* x) { return _mm256_loadu_ps(x); }
  static void store(float* out, Floats x) { _mm256_storeu_ps(out, x); }
  static Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
  static Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
  static Floats add_product(Floats sum, Floats a, Floats b) { return add(sum, mul(a, b)); }
  static Ints bit_and(Ints a, int32_t b) { return _mm256_and_si256(a, ints(b)); }
  static Ints bit_or(Ints a, Ints b) { return _mm256_or_si256(a, b); }
  template <int kBits>
  static Ints shift_left(Ints a) {
    return _mm256_slli_epi32(a, kBits);
  }
  static Mask equal(Ints a, Ints b) { return _mm256_cmpeq_epi32(a, b); }
  static Ints select(Mask mask, Ints yes, Ints no) { return _mm256_blendv_epi8(no, yes, mask); }

  static __m128i load_half(const void* x) {
    return _mm_loadl_epi64(static_cast<const __m128i*>(x));
  }
  static Ints load_bytes(const uint8_t* x) { return _mm256_cvtepu8_epi32(load_half(x)); }
  static Ints load_words(const uint16_t* x) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  }
  // The value of the three lowest bits of a lane, with the sign of the code that `shift` brings to
  // the highest bit.
  template <int kShift>
  static Floats values(Ints codes, Ints unshifted) {
    const Floats magnitudes = _mm256_permutevar8x32_ps(
        _mm256_setr_ps(0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F), codes);
    return floats(bit_or(bits(magnitudes), bit_and(shift_left<kShift>(unshifted), INT32_MIN)));
  }
  // A byte in each 64 bits: the shift brings its upper four bits to the odd lane.
  static Floats decode_e2m1(const uint8_t* packed) {
    const Ints bytes = _mm256_cvtepu8_epi64(_mm_loadu_si32(packed));
    const Ints codes = bit_or(bytes, _mm256_slli_epi64(bytes, 28));
    return values<28>(codes, codes);
  }

  struct Unit {
    static constexpr int kStrips = 1;
    static Ints load(const uint8_t* const* strips, int64_t byte) {
      return load_bytes(strips[0] + byte);
    }
    template <bool kOdd>
    static Floats values(Ints codes) {
      if constexpr (kOdd) {
        return Avx2::values<24>(_mm256_srli_epi32(codes, 4), codes);
      } else {
        return Avx2::values<28>(codes, codes);
      }
    }
    template <bool kOdd>
    static Ints scales(const uint8_t* const* strips, int64_t byte) {
      const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(strips[0] + byte));
      return _mm256_cvtepu16_epi32(kOdd ? _mm_srli_epi16(all, 8)
                                        : _mm_and_si128(all, _mm_set1_epi16(0xFF)));
    }
  };
};

}  // namespace

const GemmKernels kGemmKernelsAvx2 = gemm_kernels::gemm_kernels_of<Avx2>();

}  // namespace narrowfloat
