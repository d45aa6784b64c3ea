// The kernels of int8_kernels.h with AVX2.
#include <immintrin.h>

#include "ops/grouped_gemm/x86/int8_kernels_text.h"

namespace narrowfloat {
namespace {

struct Avx2 {
  static constexpr const EpilogueKernels* kEpilogue = &kEpilogueKernelsAvx2;
  static constexpr int kLanes = 8;
  static constexpr int kRegisterRows = 4;
  static constexpr int kVectors = 1;
  // 8 KiB of codes of two strips, which four passes find in the first-level cache.
  static constexpr int64_t kChunkCols = 512;
  using Floats = __m256;
  using Ints = __m256i;

  static Floats floats(float x) { return _mm256_set1_ps(x); }
  static Floats floats(Ints bits) { return _mm256_castsi256_ps(bits); }
  static Ints bits(Floats x) { return _mm256_castps_si256(x); }
  static Ints ints(int32_t x) { return _mm256_set1_epi32(x); }
  static Floats load(const float* x) { return _mm256_loadu_ps(x); }
  static void store(float* out, Floats x) { _mm256_storeu_ps(out, x); }
  static Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
  static Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
  static Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static Floats to_floats(Ints x) { return _mm256_cvtepi32_ps(x); }
  static Ints round(Floats x) { return _mm256_cvtps_epi32(x); }
  static Ints larger(Ints a, Ints b) { return _mm256_max_epi32(a, b); }
  static int32_t largest(Ints x) {
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xB1)));
  }
  static int32_t total(Ints x) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1)));
  }
  static Ints bit_and(Ints a, int32_t b) { return _mm256_and_si256(a, ints(b)); }
  static Ints bit_or(Ints a, Ints b) { return _mm256_or_si256(a, b); }
  template <int kBits>
  static Ints shift_left(Ints a) {
    return _mm256_slli_epi32(a, kBits);
  }
  static Ints equal(Ints a, Ints b) { return _mm256_cmpeq_epi32(a, b); }
  static Ints select(Ints mask, Ints yes, Ints no) { return _mm256_blendv_epi8(no, yes, mask); }
  static Ints load_bytes(const uint8_t* x) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x)));
  }
  static Ints load_words(const uint16_t* x) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  }
  static void store_bytes(uint8_t* out, Ints x) {
    const __m128i words =
        _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packs_epi16(words, words));
  }

  static void decode(const uint8_t* codes, Ints& low, Ints& high) {
    const Ints values = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    const Ints mask = _mm256_set1_epi8(0xF);
    const Ints packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    low = _mm256_shuffle_epi8(values, _mm256_and_si256(packed, mask));
    high = _mm256_shuffle_epi8(values, _mm256_and_si256(_mm256_srli_epi16(packed, 4), mask));
  }
  // Sums of 16 columns fit 16 bits: a lane's half has eight products of at most 24 * 127.
  template <int kQuads, int kCount>
  static void add_products(Ints* sums, const Ints (*weights)[kCount], const uint8_t* values) {
    for (int first = 0; first < kQuads; first += 4) {
      Ints words[kCount];
      for (int quad = first; quad < first + 4; ++quad) {
        const Ints four = ints(int8_kernels::load_as<int32_t>(values + 4 * quad));
        for (int v = 0; v < kCount; ++v) {
          const Ints products = _mm256_maddubs_epi16(weights[quad][v], four);
          words[v] = quad == first ? products : _mm256_add_epi16(words[v], products);
        }
      }
      for (int v = 0; v < kCount; ++v) {
        sums[v] = _mm256_add_epi32(sums[v], _mm256_madd_epi16(words[v], _mm256_set1_epi16(1)));
      }
    }
  }
};

}  // namespace

const Int8Kernels kInt8KernelsAvx2 = int8_kernels::int8_kernels_of<Avx2>();

}  // namespace narrowfloat
