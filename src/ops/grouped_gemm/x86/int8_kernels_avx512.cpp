// The kernels of int8_kernels.h with AVX-512 F, BW, VL, DQ, VBMI and VNNI.
#include <immintrin.h>

#include "ops/grouped_gemm/x86/int8_kernels_text.h"

namespace narrowfloat {
namespace {

struct Avx512 {
  static constexpr const EpilogueKernels* kEpilogue = &kEpilogueKernelsAvx512;
  static constexpr int kLanes = 16;
  static constexpr int kRegisterRows = 7;
  static constexpr int kVectors = 2;
  static constexpr int64_t kChunkCols = INT64_MAX;  // Two strips are one pass.
  using Floats = __m512;
  using Ints = __m512i;

  static Floats floats(float x) { return _mm512_set1_ps(x); }
  static Floats floats(Ints bits) { return _mm512_castsi512_ps(bits); }
  static Ints bits(Floats x) { return _mm512_castps_si512(x); }
  static Ints ints(int32_t x) { return _mm512_set1_epi32(x); }
  static Floats load(const float* x) { return _mm512_loadu_ps(x); }
  static void store(float* out, Floats x) { _mm512_storeu_ps(out, x); }
  static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  static Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
  static Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
  static Ints round(Floats x) { return _mm512_cvtps_epi32(x); }
  static Ints larger(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
  static int32_t largest(Ints x) { return _mm512_reduce_max_epi32(x); }
  static int32_t total(Ints x) { return _mm512_reduce_add_epi32(x); }
  static Ints bit_and(Ints a, int32_t b) { return _mm512_and_si512(a, ints(b)); }
  static Ints bit_or(Ints a, Ints b) { return _mm512_or_si512(a, b); }
  template <int kBits>
  static Ints shift_left(Ints a) {
    return _mm512_slli_epi32(a, kBits);
  }
  static __mmask16 equal(Ints a, Ints b) { return _mm512_cmpeq_epi32_mask(a, b); }
  static Ints select(__mmask16 mask, Ints yes, Ints no) {
    return _mm512_mask_blend_epi32(mask, no, yes);
  }
  static Ints load_bytes(const uint8_t* x) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  }
  static Ints load_words(const uint16_t* x) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
  }
  static void store_bytes(uint8_t* out, Ints x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(x));
  }

  // The permutation reads six bits of an index. The upper two are not the code's, so values stand
  // four times.
  static void decode(const uint8_t* codes, Ints& low, Ints& high) {
    const Ints values = _mm512_broadcast_i32x4(
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    const Ints packed = _mm512_loadu_si512(codes);
    low = _mm512_permutexvar_epi8(packed, values);
    high = _mm512_permutexvar_epi8(_mm512_srli_epi16(packed, 4), values);
  }
  template <int kQuads, int kCount>
  static void add_products(Ints* sums, const Ints (*weights)[kCount], const uint8_t* values) {
    for (int quad = 0; quad < kQuads; ++quad) {
      const Ints four = ints(int8_kernels::load_as<int32_t>(values + 4 * quad));
      for (int v = 0; v < kCount; ++v) {
        sums[v] = _mm512_dpbusd_epi32(sums[v], weights[quad][v], four);
      }
    }
  }
};

}  // namespace

const Int8Kernels kInt8KernelsAvx512 = int8_kernels::int8_kernels_of<Avx512>();

}  // namespace narrowfloat
