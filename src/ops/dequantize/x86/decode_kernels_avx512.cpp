// The kernels with AVX-512 F, BW, VL, DQ and VBMI.
#include <immintrin.h>

#include "ops/dequantize/x86/decode_kernels_text.h"
#include "tensor/x86/constants_text.h"

namespace narrowfloat {
namespace {

// The bits of eight packed bytes at which the code of each lane starts: 32-bit lanes hold the codes
// in order, and so do words, of which each half of a vector has 16.
constexpr auto kCodeOfLane = made_by<uint8_t>([](int byte) { return byte / 4 * 4; });
constexpr auto kCodeOfWord = made_by<uint8_t>([](int byte) { return byte / 2 % 16 * 4; });
// Bit 4 of a word's index chooses between the tables of two blocks.
constexpr auto kBlockOfWord = made_by<uint16_t>([](int word) { return word / 16 * 16; });

// A table of E2M1 in bf16 has two mantissas, the factor's (a) and that of 3/2 of it (b): 0, a / 2,
// a, b, 2a, 2b, 4a, 4b, then these with the sign. Mantissas are words, two a block; a vector has
// the tables of two blocks, or twice that of one.
constexpr int mantissa_of(int word) { return word % 8 > 2 ? word % 2 : 0; }
constexpr auto kMantissaOfOne = made_by<uint16_t>(mantissa_of);
constexpr auto kMantissaOfTwo =
    made_by<uint16_t>([](int word) { return word / 16 * 2 + mantissa_of(word); });
constexpr auto kExponentOfWord =
    made_by<uint16_t>([](int word) { return word / 8 % 2 * 0x8000 + (word % 8 / 2 - 1) * 0x80; });
constexpr auto kZeros = made_by<uint16_t>([](int word) { return word % 16 == 8 ? 0x8000 : 0; });
constexpr uint32_t kNotZeros = 0xFEFEFEFE;

// The magnitudes of E4M3 with the exponent field 0, as if it were that of normal numbers, then as
// it is that of denormals; and which of their upper halves a word takes.
constexpr auto kSmallE4m3 =
    made_by<float>([](int lane) { return lane < 8 ? (8 + lane) * 0x1p-10 : (lane - 8) * 0x1p-9; });
constexpr auto kNormalOfWord = made_by<uint16_t>([](int word) { return word % 8 * 2 + 1; });
constexpr auto kDenormalOfWord = made_by<uint16_t>([](int word) { return word % 8 * 2 + 17; });

struct Avx512 {
  static constexpr int kLanes = 16;
  static constexpr bool kHasTables = true;
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
    return _mm512_permutexvar_ps(codes, e2m1_values());
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

  template <typename Number>
  static Ints load(const Constants<Number>& vector) {
    return _mm512_load_si512(&vector);
  }
  static Floats e2m1_values() {
    return _mm512_setr_ps(0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F,  //
                          -0.0F, -0.5F, -1.0F, -1.5F, -2.0F, -3.0F, -4.0F, -6.0F);
  }
  static Ints broadcast_8_bytes(const uint8_t* x) {
    int64_t bytes = 0;
    __builtin_memcpy(&bytes, x, sizeof(bytes));
    return _mm512_set1_epi64(bytes);
  }
  // Numbers with the upper halves of bf16 and arbitrary lower ones. They are finite and small
  // enough.
  static Ints rounded_to_bf16(Floats x) {
    const Ints odd = bit_and(shift_right<16>(bits(x)), 1);
    return add(add(bits(x), ints(0x7FFF)), odd);
  }

  // Whether the bits of all of the first `count` lanes are in [least, beyond).
  static bool are_in_range(Ints x, int64_t count, uint32_t least, uint32_t beyond) {
    const auto used = static_cast<Mask>((1U << count) - 1U);
    const Ints above = _mm512_sub_epi32(x, ints(static_cast<int32_t>(least)));
    return _mm512_mask_cmpge_epu32_mask(used, above, ints(static_cast<int32_t>(beyond - least))) ==
           0;
  }
  // Whether a factor times E2M1 or E4M3 is a normal number in fp32 and in bf16.
  static bool are_of_middle_range(Ints factors, int64_t count) {
    return are_in_range(factors, count, __builtin_bit_cast(uint32_t, 0x1p-100F),
                        __builtin_bit_cast(uint32_t, 0x1p100F));
  }

  template <DecodedBlock kBlock, DecodedType kType>
  static bool store_by_tables(const uint8_t* codes, int64_t blocks, const float* factors,
                              uint8_t* out) {
    if constexpr (!decode_kernels::is_e2m1(kBlock)) {
      if (has_nan(codes, blocks * decode_kernels::cols(kBlock))) return false;
      if constexpr (kType == DecodedType::kBf16) {
        return store_e4m3_as_bf16<decode_kernels::cols(kBlock)>(codes, blocks, factors, out);
      }
      return store_e4m3<kBlock, kType>(codes, blocks, factors, out);
    } else if constexpr (kType == DecodedType::kBf16) {
      return store_e2m1_as_bf16<kBlock == DecodedBlock::kE2M1Of16>(codes, blocks, factors, out);
    } else if constexpr (kType == DecodedType::kF16) {
      return store_e2m1_as_f16<kBlock == DecodedBlock::kE2M1Of16>(codes, blocks, factors, out);
    } else {
      return store_e2m1_as_f32<decode_kernels::cols(kBlock)>(codes, blocks, factors, out);
    }
  }

  static bool are_finite(const float* factors, int64_t count) {
    const Ints magnitudes = bit_and(_mm512_loadu_si512(factors), 0x7FFFFFFF);
    return are_in_range(magnitudes, count, 0, 0x7F800000);
  }

  template <int64_t kCols>
  static bool store_e2m1_as_f32(const uint8_t* codes, int64_t blocks, const float* factors,
                                uint8_t* out) {
    if (!are_finite(factors, blocks)) return false;
    for (int64_t block = 0; block < blocks; ++block) {
      const Floats table = mul(e2m1_values(), broadcast(factors + block));
      for (int64_t elem = block * kCols; elem < (block + 1) * kCols; elem += kLanes) {
        const Ints indices =
            _mm512_multishift_epi64_epi8(load(kCodeOfLane), broadcast_8_bytes(codes + elem / 2));
        store_f32(out + 4 * elem, _mm512_permutexvar_ps(indices, table));
      }
    }
    return true;
  }

  // Stores 32 words of 16 packed bytes. Table: one of 16 words for each 16 elements.
  template <bool kHasTwoTables>
  static void store_words_of(Ints tables, const uint8_t* packed, uint8_t* out) {
    int64_t second = 0;
    __builtin_memcpy(&second, packed + 8, sizeof(second));
    const Ints bytes = _mm512_mask_set1_epi64(broadcast_8_bytes(packed), 0xF0, second);
    Ints indices = _mm512_multishift_epi64_epi8(load(kCodeOfWord), bytes);
    if constexpr (kHasTwoTables) {
      indices =
          _mm512_ternarylogic_epi32(indices, _mm512_set1_epi16(15), load(kBlockOfWord), kAndOr);
    }
    _mm512_storeu_si512(out, _mm512_permutexvar_epi16(indices, tables));
  }

  // Stores the values of blocks of 32 or of pairs of blocks of 16: table_of(first block).
  template <bool kIsOf16, typename TableOf>
  static void store_e2m1_words(const uint8_t* codes, int64_t blocks, uint8_t* out,
                               const TableOf& table_of) {
    constexpr int64_t kStep = kIsOf16 ? 2 : 1;
    int64_t block = 0;
    for (; block + kStep <= blocks; block += kStep, codes += 16, out += 64) {
      store_words_of<kIsOf16>(table_of(block), codes, out);
    }
    if (block < blocks) {
      uint8_t last_codes[16] = {};
      uint8_t last_words[64];
      __builtin_memcpy(last_codes, codes, 8);
      store_words_of<kIsOf16>(table_of(block), last_codes, last_words);
      __builtin_memcpy(out, last_words, 32);
    }
  }

  template <bool kIsOf16>
  static bool store_e2m1_as_bf16(const uint8_t* codes, int64_t blocks, const float* factors,
                                 uint8_t* out) {
    const Ints group = _mm512_loadu_si512(factors);
    if (!are_of_middle_range(group, blocks)) return false;
    // The two mantissas of each block.
    const Ints first = shift_right<16>(rounded_to_bf16(floats(group)));
    const Ints second = rounded_to_bf16(mul(floats(group), floats(1.5F)));
    const Ints mantissas = _mm512_mask_blend_epi16(0xAAAAAAAA, first, second);
    Ints of_words = load(kIsOf16 ? kMantissaOfTwo : kMantissaOfOne);
    store_e2m1_words<kIsOf16>(codes, blocks, out, [&](int64_t /*block*/) {
      const Ints numbers = _mm512_permutexvar_epi16(of_words, mantissas);
      of_words = _mm512_add_epi16(of_words, _mm512_set1_epi16(kIsOf16 ? 4 : 2));
      return _mm512_mask_add_epi16(load(kZeros), kNotZeros, numbers, load(kExponentOfWord));
    });
    return true;
  }

  template <bool kIsOf16>
  static bool store_e2m1_as_f16(const uint8_t* codes, int64_t blocks, const float* factors,
                                uint8_t* out) {
    if (!are_finite(factors, blocks)) return false;
    const auto table = [&](int64_t block) {
      return _mm512_cvtps_ph(mul(e2m1_values(), broadcast(factors + block)),
                             _MM_FROUND_TO_NEAREST_INT);
    };
    store_e2m1_words<kIsOf16>(codes, blocks, out, [&](int64_t block) {
      const __m256i first = table(block);
      const __m256i second = kIsOf16 && block + 1 < blocks ? table(block + 1) : first;
      return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
    });
    return true;
  }

  static bool has_nan(const uint8_t* codes, int64_t count) {
    const __m256i magnitude = _mm256_set1_epi8(0x7F);
    __m256i largest = _mm256_setzero_si256();
    for (int64_t code = 0; code < count; code += 32) {
      const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + code));
      largest = _mm256_max_epu8(largest, _mm256_and_si256(x, magnitude));
    }
    return _mm256_cmpeq_epi8_mask(largest, magnitude) != 0;
  }

  // The bits of a code at the place of fp32's are a 2^120th of the number. The factors have room
  // for that power: the product is the same, and rounds once.
  template <DecodedBlock kBlock, DecodedType kType>
  static bool store_e4m3(const uint8_t* codes, int64_t blocks, const float* factors, uint8_t* out) {
    constexpr int64_t kCols = decode_kernels::cols(kBlock);
    const Ints group = _mm512_loadu_si512(factors);
    if (!are_in_range(bit_and(group, 0x7FFFFFFF), blocks, 0,
                      __builtin_bit_cast(uint32_t, 0x1p7F))) {
      return false;
    }
    alignas(64) float large[kLanes];
    _mm512_store_ps(large, mul(floats(group), floats(0x1p120F)));
    for (int64_t block = 0; block < blocks; ++block) {
      const Floats factor = broadcast(large + block);
      for (int64_t elem = block * kCols; elem < (block + 1) * kCols; elem += kLanes) {
        const Ints bytes =
            _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + elem)));
        const Ints small = bit_and(shift_left<20>(bytes), static_cast<int32_t>(0x87F00000));
        decode_kernels::store<Avx512, kType, false>(mul(floats(small), factor), out, elem);
      }
    }
    return true;
  }

  // A number is that of its mantissa plus the exponent field, except for denormals.
  template <int64_t kCols>
  static bool store_e4m3_as_bf16(const uint8_t* codes, int64_t blocks, const float* factors,
                                 uint8_t* out) {
    if (!are_of_middle_range(_mm512_loadu_si512(factors), blocks)) return false;
    const Floats small = floats(load(kSmallE4m3));
    for (int64_t block = 0; block < blocks; ++block) {
      const Ints numbers = rounded_to_bf16(mul(small, broadcast(factors + block)));
      const Ints normal = _mm512_permutexvar_epi16(load(kNormalOfWord), numbers);
      const Ints denormal = _mm512_permutexvar_epi16(load(kDenormalOfWord), numbers);
      for (int64_t elem = block * kCols; elem < (block + 1) * kCols; elem += 32) {
        const Ints words = _mm512_cvtepi8_epi16(
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + elem)));
        const Ints exponent =
            _mm512_and_si512(_mm512_slli_epi16(words, 4), _mm512_set1_epi16(0x780));
        const Ints magnitude = _mm512_add_epi16(_mm512_permutexvar_epi16(words, normal), exponent);
        const Ints number = _mm512_mask_permutexvar_epi16(
            magnitude, _mm512_testn_epi16_mask(words, _mm512_set1_epi16(0x78)), words, denormal);
        const Ints sign = _mm512_set1_epi16(static_cast<int16_t>(0x8000));
        _mm512_storeu_si512(out + 2 * elem,
                            _mm512_ternarylogic_epi32(number, words, sign, kOrMasked));
      }
    }
    return true;
  }
};

}  // namespace

const DecodeKernels kDecodeKernelsAvx512 = decode_kernels::decode_kernels_of<Avx512>();

}  // namespace narrowfloat
