// The kernels with AVX-512 F, BW, VL and DQ.
#include <immintrin.h>

#include "ops/dequantize/x86/decode_kernels_text.h"

namespace narrowfloat {
namespace {

struct Avx512 {
  static constexpr int kLanes = 16;
  using Floats = __m512;
  using Ints = __m512i;
  using Mask = __mmask16;

  static Floats broadcast(const float* x) { return _mm512_set1_ps(*x); }
  static Floats floats(float x) { return _mm512_set1_ps(x); }
  static Floats floats(Ints bits) { return _mm512_castsi512_ps(bits); }
  static Ints bits(Floats x) { return _mm512_castps_si512(x); }
  static Ints ints(int32_t x) { return _mm512_set1_epi32(x); }
  static Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
  static Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
  static Ints bit_and(Ints a, int32_t b) { return _mm512_and_si512(a, ints(b)); }
  static Ints bit_or(Ints a, Ints b) { return _mm512_or_si512(a, b); }
  template <int kBits>
  static Ints shift_right(Ints a) {
    return _mm512_srli_epi32(a, kBits);
  }
  template <int kBits>
  static Ints shift_left(Ints a) {
    return _mm512_slli_epi32(a, kBits);
  }
  static Mask equal(Ints a, Ints b) { return _mm512_cmpeq_epi32_mask(a, b); }
  static Mask unordered(Floats a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
  static Ints select(Mask mask, Ints yes, Ints no) {
    return _mm512_mask_blend_epi32(mask, no, yes);
  }

  static Ints load_bytes(const uint8_t* x) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  }
  // A byte in each 64 bits: the shift brings its upper four bits to the odd lane. The permutation
  // reads four bits of a lane.
  static Floats decode_e2m1(const uint8_t* packed) {
    const Ints bytes =
        _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(packed)));
    const Ints codes = bit_or(bytes, _mm512_slli_epi64(bytes, 28));
    const Floats values = _mm512_setr_ps(0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F,  //
                                         -0.0F, -0.5F, -1.0F, -1.5F, -2.0F, -3.0F, -4.0F, -6.0F);
    return _mm512_permutexvar_ps(codes, values);
  }

  static void store_f32(void* out, Floats x) { _mm512_storeu_ps(out, x); }
  static void store_f16(void* out, Floats x) {
    _mm256_storeu_si256(static_cast<__m256i*>(out), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  static void store_words(void* out, Ints x) {
    _mm256_storeu_si256(static_cast<__m256i*>(out), _mm512_cvtepi32_epi16(x));
  }
  static void stream_line(void* to, const void* from) {
    _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_loadu_si512(from));
  }
  static void finish_stream() { _mm_sfence(); }
};

}  // namespace

const DecodeKernels kDecodeKernelsAvx512 = decode_kernels::decode_kernels_of<Avx512>();

}  // namespace narrowfloat
