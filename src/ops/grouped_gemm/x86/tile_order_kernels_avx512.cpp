// TileOrderKernels of amx_kernels.h with AVX-512 F, BW, VL, DQ, VBMI and BF16: decoded weights, and
// sums of few rows in the order and with the bits of tiles.
#include <immintrin.h>
#include <type_traits>

#include "ops/grouped_gemm/x86/amx_kernels.h"
#include "ops/grouped_gemm/x86/scaled_runs_text_avx512.h"

namespace narrowfloat {
namespace {

constexpr int64_t kStripLanes = 16;
constexpr int64_t kPairBytes = e2m1_text::kPairBytes;
constexpr int64_t kPrefetchBytes = 4096;
constexpr int64_t kHalf = kTileRunCols / 2;
constexpr int32_t kUpperHalf = static_cast<int32_t>(0xFFFF0000U);

// Names of this source alone: docs/architecture.md, levels of vector instructions.
struct Source {};
using Text = e2m1_text::Avx512<Source>;
using E2m1Decoder = Text::E2m1Decoder;
using Runs = e2m1_text::ScaledRuns<Source>;

// Two columns in fp32.
struct Pair {
  __m512 even;
  __m512 odd;
};

// Widens the bf16 values of two columns in every lane.
Pair widened(__m512i words) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(words, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(kUpperHalf)))};
}

Pair scaled(const Pair& pair, __m512 scales) {
  return {_mm512_mul_ps(pair.even, scales), _mm512_mul_ps(pair.odd, scales)};
}

// ---- decoded weights

// Stores two lines of weights in tile order: columns k and k + 1 of a run, and those 16 further.
void store_ordered(__m512i first, __m512i second, uint16_t* out) {
  constexpr __mmask32 kOdd = 0xAAAAAAAAU;
  const __m512i odd_columns = _mm512_mask_blend_epi16(kOdd, _mm512_srli_epi32(first, 16), second);
  const __m512i even_columns = _mm512_mask_blend_epi16(kOdd, first, _mm512_slli_epi32(second, 16));
  _mm512_storeu_si512(out, odd_columns);
  _mm512_storeu_si512(out + 2 * kStripLanes, even_columns);
}

void order(uint16_t* weights, int64_t cols) {
  constexpr int64_t kLine = 2 * kStripLanes;
  for (int64_t k = 0; k < cols; k += kTileRunCols, weights += kTileRunCols * kStripLanes) {
    __m512i lines[kTileRunCols / 2];
    for (int64_t i = 0; i < kTileRunCols / 2; ++i) {
      lines[i] = _mm512_loadu_si512(weights + i * kLine);
    }
    for (int64_t i = 0; i < kTileRunCols / 4; ++i) {
      store_ordered(lines[i], lines[i + kTileRunCols / 4], weights + 2 * i * kLine);
    }
  }
}

template <class Scales, int64_t kBlockCols>
void decode_runs(const uint8_t* codes, const uint8_t* scales, int64_t cols, uint16_t* out) {
  constexpr int64_t kRunBytes = kTileRunCols * kPairBytes / 2;
  constexpr int64_t kLineBytes = 64;
  const Runs::Decoder<Scales> decoder;
  for (int64_t k = 0; k < cols; k += kTileRunCols) {
    const uint8_t* run = codes + k * kPairBytes / 2;
    for (int64_t byte = 0; byte < kRunBytes; byte += kLineBytes) {
      __builtin_prefetch(run + byte + kPrefetchBytes);
    }
    decoder.decode(run, scales + k / kBlockCols * kStripLanes, k + kHalf < cols,
                   out + k * kStripLanes);
  }
}

void decode_scaled(const uint8_t* codes, const uint8_t* scales, Bf16StripScale type, int64_t cols,
                   uint16_t* out) {
  (type == Bf16StripScale::kE4M3 ? decode_runs<Runs::E4m3Scales, 16>
                                 : decode_runs<Runs::PowersOfTwo, 32>)(codes, scales, cols, out);
}

// ---- few rows

// As Text::decode_scales(), but no denormal number is an operand.
__m512 decode_e4m3_scales(const uint8_t* codes) {
  const __m512i lanes = _mm512_cvtepu8_epi32(Text::load_16(codes));
  const __m512i magnitude = _mm512_and_si512(lanes, _mm512_set1_epi32(0x7F));
  const __mmask16 is_denormal = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(8));
  // The exponent of E4M3 is 120 less. Denormals m * 2^-9 are (1 + m / 8) * 2^-6 - 2^-6.
  __m512i bits = _mm512_add_epi32(_mm512_slli_epi32(magnitude, 20), _mm512_set1_epi32(120 << 23));
  bits = _mm512_mask_add_epi32(bits, is_denormal, bits, _mm512_set1_epi32(1 << 23));
  __m512 number = _mm512_castsi512_ps(bits);
  number = _mm512_mask_sub_ps(number, is_denormal, number, _mm512_set1_ps(0x1p-6F));
  bits = _mm512_mask_mov_epi32(_mm512_castps_si512(number),
                               _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7F)),
                               _mm512_set1_epi32(decode_text::kCanonicalNan));
  const __m512i sign = _mm512_slli_epi32(_mm512_srli_epi32(lanes, 7), 31);
  return _mm512_castsi512_ps(_mm512_or_si512(bits, sign));
}

template <int kRows, int kStrips>
struct FewSums {
  __m512 of[kRows][kStrips];
};

enum class FewWeights {
  kScaled,  // Codes times scales, in fp32.
  kCodes,
  kPowers,  // Codes; the sum of a run is multiplied by its scales, powers of two.
};

// Sums of half a run for kScaled.
struct ScaledRun {
  using Values = Pair;
  static Values values(__m512i pair) { return widened(pair); }
  static Values weights(__m512i codes, __m512 scales) { return scaled(widened(codes), scales); }
  static __m512 add(__m512 sum, const Values& x, const Values& w) {
    return _mm512_fmadd_ps(x.even, w.even, _mm512_fmadd_ps(x.odd, w.odd, sum));
  }
};

// Codes are operands of the dot products as they are; a scale is applied to their sum.
struct CodesRun {
  using Values = __m512i;
  static Values values(__m512i pair) { return pair; }
  static __m512i weights(__m512i codes, __m512 /*scales*/) { return codes; }
  static __m512 add(__m512 sum, Values x, __m512i w) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(w));
  }
};

__m512 few_scales(const FewBf16Rows& task, int64_t strip, int64_t k) {
  const uint8_t* codes = task.scales[strip] + k / task.block_cols * kStripLanes;
  return task.type == Bf16StripScale::kE4M3 ? decode_e4m3_scales(codes)
                                            : Text::decode_scales(Bf16StripScale::kUE8M0, codes);
}

// Adds the products of columns [first, end), whole runs but for the last, of strips from `strip`
// on.
template <int kRows, int kStrips, FewWeights kWeights>
[[gnu::noinline]] void add_runs(const FewBf16Rows& task, int64_t strip, int64_t first, int64_t end,
                                FewSums<kRows, kStrips>& sums) {
  constexpr bool kIsScaled = kWeights == FewWeights::kScaled;
  using Run = std::conditional_t<kIsScaled, ScaledRun, CodesRun>;
  // Zeros have the signs that they have in tiles.
  const bool loses_signs = kIsScaled && task.type == Bf16StripScale::kUE8M0;
  const E2m1Decoder decoder(loses_signs ? Text::e2m1_values_times(0) : Text::e2m1_values());
  for (int64_t begin = first; begin < end; begin += kTileRunCols) {
    // Sums of the two halves; the last run may lack the second.
    const int halves = begin + kHalf < end ? 2 : 1;
    __m512 of_halves[2][kRows][kStrips];
    __m512 scales[2][kStrips] = {};
    for (int half = 0; half < 2; ++half) {
      for (auto& row : of_halves[half]) {
        for (__m512& sum : row) sum = _mm512_setzero_ps();
      }
      for (int i = 0; kIsScaled && half < halves && i < kStrips; ++i) {
        scales[half][i] = few_scales(task, strip + i, begin + half * kHalf);
      }
    }
    const auto add_pair = [&](int64_t k, int half) {
      typename Run::Values x[kRows];
      for (int row = 0; row < kRows; ++row) {
        x[row] = Run::values(Text::broadcast_pair(task.values[row] + k));
      }
      for (int i = 0; i < kStrips; ++i) {
        const uint8_t* codes = task.codes[strip + i] + k * kPairBytes / 2;
        if ((k - begin) % 8 == 0) __builtin_prefetch(codes + kPrefetchBytes);
        const auto w = Run::weights(decoder.decode(codes), scales[half][i]);
        for (int row = 0; row < kRows; ++row) {
          of_halves[half][row][i] = Run::add(of_halves[half][row][i], x[row], w);
        }
      }
    };
    if (halves == 2) {
#pragma GCC unroll 16
      for (int64_t k = 0; k < kHalf; k += 2) {
        add_pair(begin + k, 0);
        add_pair(begin + k + kHalf, 1);
      }
    } else {
      for (int64_t k = begin; k < begin + kHalf; k += 2) add_pair(k, 0);
    }
    for (int i = 0; i < kStrips; ++i) {
      const __m512 scale =
          kWeights == FewWeights::kPowers ? few_scales(task, strip + i, begin) : __m512{};
      for (int row = 0; row < kRows; ++row) {
        const __m512 sum = _mm512_add_ps(of_halves[0][row][i], of_halves[1][row][i]);
        __m512& total = sums.of[row][i];
        total = kWeights == FewWeights::kPowers ? _mm512_fmadd_ps(scale, sum, total)
                                                : _mm512_add_ps(total, sum);
      }
    }
  }
}

// Calls add_runs() with magnitudes below 2^-126 as zero, as operands and as results. That is a
// function of its own, since compilers may move arithmetic past a change of the environment.
template <int kRows, int kStrips, FewWeights kWeights>
void add_as_tiles(const FewBf16Rows& task, int64_t strip, int64_t first, int64_t end,
                  FewSums<kRows, kStrips>& sums) {
  constexpr unsigned int kFlushToZero = 0x8000;
  constexpr unsigned int kDenormalsAreZero = 0x0040;
  const unsigned int environment = _mm_getcsr();
  _mm_setcsr(environment | kFlushToZero | kDenormalsAreZero);
  add_runs<kRows, kStrips, kWeights>(task, strip, first, end, sums);
  _mm_setcsr(environment);
}

template <int kRows, int kStrips, FewWeights kWeights>
void multiply_strips(const FewBf16Rows& task, int64_t sum_cols, int64_t strip) {
  FewSums<kRows, kStrips> totals = {};
  if (sum_cols == 0) {
    add_as_tiles<kRows, kStrips, kWeights>(task, strip, 0, task.cols, totals);
  }
  for (int64_t first = 0, block = 0; sum_cols != 0 && first < task.cols;
       first += sum_cols, ++block) {
    const int64_t end = first + sum_cols < task.cols ? first + sum_cols : task.cols;
    FewSums<kRows, kStrips> inner = {};
    add_as_tiles<kRows, kStrips, kWeights>(task, strip, first, end, inner);
    for (int i = 0; i < kStrips; ++i) {
      const uint8_t* scales = task.scales[strip + i] + block * kStripLanes;
      const __m512 of_weights = kWeights == FewWeights::kCodes
                                    ? Text::decode_scales(task.type, scales)
                                    : _mm512_set1_ps(1.0F);
      for (int row = 0; row < kRows; ++row) {
        __m512 factors = of_weights;
        if (task.row_scales[row] != nullptr) {
          const float scale = task.row_scales[row][block / task.blocks_per_row_scale];
          factors = _mm512_mul_ps(_mm512_set1_ps(scale), factors);
        }
        totals.of[row][i] = _mm512_fmadd_ps(factors, inner.of[row][i], totals.of[row][i]);
      }
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int i = 0; i < kStrips; ++i) {
      _mm512_storeu_ps(task.sums[row] + (strip + i) * kStripLanes, totals.of[row][i]);
    }
  }
}

// As many strips at once as registers hold; strips are independent.
template <int kRows, FewWeights kWeights>
void multiply_rows(const FewBf16Rows& task, int64_t sum_cols) {
  constexpr int kStrips = kRows == 1 ? 4 : 2;
  int64_t strip = 0;
  for (; strip + kStrips <= task.strips; strip += kStrips) {
    multiply_strips<kRows, kStrips, kWeights>(task, sum_cols, strip);
  }
  for (; strip < task.strips; ++strip) multiply_strips<kRows, 1, kWeights>(task, sum_cols, strip);
}

// Whether sums of a run times its scales have the bits of sums of scaled weights: no sum of either
// is below 2^-126 or overflows. Values have eight significant bits, a run 32 products.
bool has_exact_powers(const FewTileRows& task) {
  const int least = task.least_weight < -1 ? task.least_weight : -1;
  const int most = task.most_weight > 2 ? task.most_weight : 2;
  constexpr int kBias = 127;
  const int low = kBias - 126 + 7 - least;
  const int end = kBias + 127 - 6 - most;
  if (end <= 1 || low >= end) return false;
  const auto bits = [](int exponent) {
    return _mm512_set1_epi16(static_cast<int16_t>((exponent < 1 ? 1 : exponent) << 7));
  };
  const __m512i lowest = bits(low);
  const __m512i above = bits(end);
  const __m512i smallest_normal = bits(1);
  __mmask32 outside = 0;
  for (int64_t row = 0; row < task.rows.rows; ++row) {
    for (int64_t k = 0; k < task.rows.cols; k += 32) {
      const int64_t left = task.rows.cols - k;
      const __mmask32 mask = left < 32 ? (1U << left) - 1 : 0xFFFFFFFFU;
      const __m512i x = _mm512_and_si512(_mm512_maskz_loadu_epi16(mask, task.rows.values[row] + k),
                                         _mm512_set1_epi16(0x7FFF));
      outside |=
          _mm512_cmpge_epu16_mask(x, above) |
          _mm512_mask_cmplt_epu16_mask(_mm512_cmpge_epu16_mask(x, smallest_normal), x, lowest);
    }
  }
  return outside == 0;
}

void multiply_few_rows(const FewTileRows& task) {
  using Function = void (*)(const FewBf16Rows&, int64_t);
  using enum FewWeights;
  constexpr Function kFunctions[3][kFewBf16Rows] = {
      {multiply_rows<1, kScaled>, multiply_rows<2, kScaled>, multiply_rows<3, kScaled>,
       multiply_rows<4, kScaled>},
      {multiply_rows<1, kCodes>, multiply_rows<2, kCodes>, multiply_rows<3, kCodes>,
       multiply_rows<4, kCodes>},
      {multiply_rows<1, kPowers>, multiply_rows<2, kPowers>, multiply_rows<3, kPowers>,
       multiply_rows<4, kPowers>}};
  FewWeights weights = kCodes;
  if (task.is_scaled) {
    const bool has_powers = task.rows.type == Bf16StripScale::kUE8M0 && has_exact_powers(task);
    weights = has_powers ? kPowers : kScaled;
  }
  kFunctions[static_cast<int>(weights)][task.rows.rows - 1](task.rows, task.sum_cols);
}

}  // namespace

const TileOrderKernels kTileOrderKernelsAvx512 = {
    .decode_scaled = decode_scaled, .order = order, .multiply_few_rows = multiply_few_rows};

}  // namespace narrowfloat
