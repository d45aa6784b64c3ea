// The kernels with AVX2 and F16C.
#include <immintrin.h>

#include "ops/dequantize/x86/decode_kernels_text.h"

namespace narrowfloat {
namespace {

struct Avx2 {
  static constexpr int kLanes = 8;
  static constexpr bool kHasTables = false;
  using Floats = __m256;
  using Ints = __m256i;
  using Mask = __m256i;

  static Floats broadcast(const float* x) { return _mm256_broadcast_ss(x); }
  static Floats floats(float x) { return _mm256_set1_ps(x); }
  static Floats floats(Ints bits) { return _mm256_castsi256_ps(bits); }
  static Ints bits(Floats x) { return _mm256_castps_si256(x); }
  static Ints ints(int32_t x) { return _mm256_set1_epi32(x); }
  static Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static Floats div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
  static Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
  static Ints bit_and(Ints a, int32_t b) { return _mm256_and_si256(a, ints(b)); }
  static Ints bit_or(Ints a, Ints b) { return _mm256_or_si256(a, b); }
  template <int kBits>
  static Ints shift_right(Ints a) {
    return _mm256_srli_epi32(a, kBits);
  }
  template <int kBits>
  static Ints shift_left(Ints a) {
    return _mm256_slli_epi32(a, kBits);
  }
  static Mask equal(Ints a, Ints b) { return _mm256_cmpeq_epi32(a, b); }
  static Mask unordered(Floats a) { return bits(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)); }
  static Ints select(Mask mask, Ints yes, Ints no) { return _mm256_blendv_epi8(no, yes, mask); }

  static Ints load_bytes(const uint8_t* x) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x)));
  }
  // A byte in each 64 bits: the shift brings its upper four bits to the odd lane. The permutation
  // reads three bits of a lane, the magnitude.
  static Floats decode_e2m1(const uint8_t* packed) {
    const Ints bytes = _mm256_cvtepu8_epi64(_mm_loadu_si32(packed));
    const Ints codes = bit_or(bytes, _mm256_slli_epi64(bytes, 28));
    const Floats magnitudes = _mm256_permutevar8x32_ps(
        _mm256_setr_ps(0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F), codes);
    return floats(bit_or(bits(magnitudes), bit_and(shift_left<28>(codes), INT32_MIN)));
  }

  static void store_f32(void* out, Floats x) { _mm256_storeu_ps(static_cast<float*>(out), x); }
  static void store_f16(void* out, Floats x) {
    _mm_storeu_si128(static_cast<__m128i*>(out), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  static void store_words(void* out, Ints x) {
    _mm_storeu_si128(static_cast<__m128i*>(out),
                     _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
  }
  static void stream_line(void* to, const void* from) {
    auto* out = static_cast<__m256i*>(to);
    const auto* in = static_cast<const __m256i*>(from);
    _mm256_stream_si256(out, _mm256_loadu_si256(in));
    _mm256_stream_si256(out + 1, _mm256_loadu_si256(in + 1));
  }
  static void finish_stream() { _mm_sfence(); }
};

}  // namespace

const DecodeKernels kDecodeKernelsAvx2 = decode_kernels::decode_kernels_of<Avx2>();

}  // namespace narrowfloat
