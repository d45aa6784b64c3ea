// The kernels of bf16_kernels.h with AVX-512 F, BW, VL, DQ, VBMI and BF16.
#include <immintrin.h>

#include "ops/grouped_gemm/x86/bf16_kernels.h"
#include "ops/grouped_gemm/x86/e2m1_text_avx512.h"

namespace narrowfloat {
namespace {

constexpr int64_t kStripLanes = 16;
constexpr int64_t kPairBytes = e2m1_text::kPairBytes;
// Codes are fetched into the cache this many bytes ahead.
constexpr int64_t kPrefetchBytes = 4096;
// Rows of a register block: 12 sums stay in registers beside the weights of two strips.
constexpr int kRegisterRows = 6;

// sums + x[1] * w[1] + x[0] * w[0] in each lane.
__m512 add_products(__m512 sums, __m512i x, __m512i w) {
  return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(w));
}

// Names of this source alone: docs/architecture.md, levels of vector instructions.
struct Source {};
using Text = e2m1_text::Avx512<Source>;
using E2m1Decoder = Text::E2m1Decoder;

void decode_e2m1(const void* codes, int64_t cols, uint16_t* out) {
  const E2m1Decoder decoder;
  const auto* bytes = static_cast<const uint8_t*>(codes);
  for (int64_t pair = 0; pair < cols / 2; ++pair) {
    if (pair % 4 == 0) __builtin_prefetch(bytes + pair * kPairBytes + kPrefetchBytes);
    _mm512_storeu_si512(out + pair * 2 * kStripLanes, decoder.decode(bytes + pair * kPairBytes));
  }
}

void decode_e4m3(const void* codes, int64_t cols, uint16_t* out) {
  const auto* bytes = static_cast<const uint8_t*>(codes);
  // Multiples of 2^-9.
  const __m512i denormals = _mm512_broadcast_i32x4(
      _mm_setr_epi16(0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60));
  for (int64_t pair = 0; pair < cols / 2; ++pair) {
    const uint8_t* columns = bytes + pair * 2 * kStripLanes;
    __builtin_prefetch(columns + kPrefetchBytes);
    const __m128i first = Text::load_16(columns);
    const __m128i second = Text::load_16(columns + kStripLanes);
    const __m512i word = _mm512_cvtepu8_epi16(
        _mm256_set_m128i(_mm_unpackhi_epi8(first, second), _mm_unpacklo_epi8(first, second)));
    const __m512i magnitude = _mm512_and_si512(word, _mm512_set1_epi16(0x7F));
    const __m512i sign = _mm512_slli_epi16(_mm512_andnot_si512(_mm512_set1_epi16(0x7F), word), 8);
    // bf16 has one more bit of exponent and its bias is 120 greater; it has four bits of fraction
    // more.
    __m512i value = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
    value = _mm512_mask_permutexvar_epi16(
        value, _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8)), magnitude, denormals);
    value =
        _mm512_mask_mov_epi16(value, _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7F)),
                              _mm512_set1_epi16(0x7FFF));
    _mm512_storeu_si512(out + pair * 2 * kStripLanes, _mm512_or_si512(value, sign));
  }
}

void decode_bf16(const void* codes, int64_t cols, uint16_t* out) {
  const auto* words = static_cast<const uint16_t*>(codes);
  const auto lanes = [](const uint16_t* column) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(column)));
  };
  for (int64_t pair = 0; pair < cols / 2; ++pair) {
    const uint16_t* columns = words + pair * 2 * kStripLanes;
    __builtin_prefetch(columns + kPrefetchBytes / 2);
    const __m512i second = _mm512_slli_epi32(lanes(columns + kStripLanes), 16);
    _mm512_storeu_si512(out + pair * 2 * kStripLanes, _mm512_or_si512(lanes(columns), second));
  }
}

void decode_scales(const uint8_t* codes, int64_t blocks, Bf16StripScale type, float* out) {
  for (int64_t i = 0; i < blocks * kStripLanes; i += kStripLanes) {
    _mm512_storeu_ps(out + i, Text::decode_scales(type, codes + i));
  }
}

template <int kRows, int kStrips>
struct Sums {
  __m512 of[kRows][kStrips];

  void clear() {
    for (int row = 0; row < kRows; ++row) {
      for (int strip = 0; strip < kStrips; ++strip) of[row][strip] = _mm512_setzero_ps();
    }
  }
  void load(const Bf16Row* rows) {
    for (int row = 0; row < kRows; ++row) {
      for (int strip = 0; strip < kStrips; ++strip) {
        of[row][strip] = _mm512_loadu_ps(rows[row].sums + strip * kStripLanes);
      }
    }
  }
  void store(const Bf16Row* rows) const {
    for (int row = 0; row < kRows; ++row) {
      for (int strip = 0; strip < kStrips; ++strip) {
        _mm512_storeu_ps(rows[row].sums + strip * kStripLanes, of[row][strip]);
      }
    }
  }
  // Adds the products of columns [first, end) of decoded strips.
  void add(const Bf16Chunk& chunk, const Bf16Row* rows, int64_t first, int64_t end) {
    for (int64_t k = first; k < end; k += 2) {
      __m512i weights[kStrips];
      for (int strip = 0; strip < kStrips; ++strip) {
        weights[strip] = _mm512_loadu_si512(chunk.weights[strip] + k * kStripLanes);
      }
      for (int row = 0; row < kRows; ++row) {
        const __m512i pair = Text::broadcast_pair(rows[row].values + k);
        for (int strip = 0; strip < kStrips; ++strip) {
          of[row][strip] = add_products(of[row][strip], pair, weights[strip]);
        }
      }
    }
  }
};

template <int kRows, int kStrips>
void multiply_rows(const Bf16Chunk& chunk, const Bf16Row* rows) {
  Sums<kRows, kStrips> inner;
  if (chunk.block_cols == 0) {
    inner.load(rows);
    inner.add(chunk, rows, 0, chunk.cols);
    return inner.store(rows);
  }
  for (int64_t first = 0, block = 0; first < chunk.cols; first += chunk.block_cols, ++block) {
    const int64_t left = chunk.cols - first;
    inner.clear();
    inner.add(chunk, rows, first, first + (left < chunk.block_cols ? left : chunk.block_cols));
    for (int strip = 0; strip < kStrips; ++strip) {
      const __m512 of_weights = _mm512_loadu_ps(chunk.factors[strip] + block * kStripLanes);
      for (int row = 0; row < kRows; ++row) {
        __m512 factor = of_weights;
        if (rows[row].scales != nullptr) {
          const float scale = rows[row].scales[block / chunk.blocks_per_row_scale];
          factor = _mm512_mul_ps(_mm512_set1_ps(scale), factor);
        }
        float* total = rows[row].sums + strip * kStripLanes;
        _mm512_storeu_ps(total,
                         _mm512_fmadd_ps(factor, inner.of[row][strip], _mm512_loadu_ps(total)));
      }
    }
  }
}

template <int kRows>
void multiply_strips(const Bf16Chunk& chunk, const Bf16Row* rows) {
  chunk.strips == 1 ? multiply_rows<kRows, 1>(chunk, rows) : multiply_rows<kRows, 2>(chunk, rows);
}

void multiply(const Bf16Chunk& chunk, const Bf16Row* rows, int64_t count) {
  using Function = void (*)(const Bf16Chunk&, const Bf16Row*);
  constexpr Function kFunctions[kRegisterRows] = {multiply_strips<1>, multiply_strips<2>,
                                                  multiply_strips<3>, multiply_strips<4>,
                                                  multiply_strips<5>, multiply_strips<6>};
  // Register blocks of nearly equal size.
  for (int64_t left = (count + kRegisterRows - 1) / kRegisterRows; left > 0; --left) {
    const int64_t some = (count + left - 1) / left;
    kFunctions[some - 1](chunk, rows);
    rows += some;
    count -= some;
  }
}

// Strips [first, first + kStrips).
template <int kRows, int kStrips>
void multiply_few_rows_of(const FewBf16Rows& task, int64_t first) {
  const E2m1Decoder decoder;
  __m512 totals[kRows][kStrips];
  for (auto& row : totals) {
    for (auto& total : row) total = _mm512_setzero_ps();
  }
  int64_t block = 0;
  for (int64_t begin = 0; begin < task.cols; begin += task.block_cols, ++block) {
    __m512 inner[kRows][kStrips];
    for (auto& row : inner) {
      for (auto& sum : row) sum = _mm512_setzero_ps();
    }
    for (int64_t k = begin; k < begin + task.block_cols; k += 2) {
      __m512i pairs[kRows];
      for (int row = 0; row < kRows; ++row) pairs[row] = Text::broadcast_pair(task.values[row] + k);
      for (int strip = 0; strip < kStrips; ++strip) {
        const uint8_t* codes = task.codes[first + strip] + k * kPairBytes / 2;
        if (k % 8 == 0) __builtin_prefetch(codes + kPrefetchBytes);
        const __m512i weights = decoder.decode(codes);
        for (int row = 0; row < kRows; ++row) {
          inner[row][strip] = add_products(inner[row][strip], pairs[row], weights);
        }
      }
    }
    for (int strip = 0; strip < kStrips; ++strip) {
      const __m512 of_weights =
          Text::decode_scales(task.type, task.scales[first + strip] + block * kStripLanes);
      for (int row = 0; row < kRows; ++row) {
        __m512 factor = of_weights;
        if (task.row_scales[row] != nullptr) {
          const float scale = task.row_scales[row][block / task.blocks_per_row_scale];
          factor = _mm512_mul_ps(_mm512_set1_ps(scale), factor);
        }
        totals[row][strip] = _mm512_fmadd_ps(factor, inner[row][strip], totals[row][strip]);
      }
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int strip = 0; strip < kStrips; ++strip) {
      _mm512_storeu_ps(task.sums[row] + (first + strip) * kStripLanes, totals[row][strip]);
    }
  }
}

// As many strips at once as registers hold; strips are independent.
template <int kRows>
void multiply_few_rows_of_strips(const FewBf16Rows& task) {
  constexpr int kStrips = kRows <= 2 ? 4 : 2;
  int64_t first = 0;
  for (; first + kStrips <= task.strips; first += kStrips) {
    multiply_few_rows_of<kRows, kStrips>(task, first);
  }
  for (; first < task.strips; ++first) multiply_few_rows_of<kRows, 1>(task, first);
}

void multiply_few_rows(const FewBf16Rows& task) {
  using Function = void (*)(const FewBf16Rows&);
  constexpr Function kFunctions[kFewBf16Rows] = {
      multiply_few_rows_of_strips<1>, multiply_few_rows_of_strips<2>,
      multiply_few_rows_of_strips<3>, multiply_few_rows_of_strips<4>};
  kFunctions[task.rows - 1](task);
}

}  // namespace

const Bf16Kernels kBf16KernelsAvx512 = {.decode_e2m1 = decode_e2m1,
                                        .decode_e4m3 = decode_e4m3,
                                        .decode_bf16 = decode_bf16,
                                        .decode_scales = decode_scales,
                                        .multiply = multiply,
                                        .multiply_few_rows = multiply_few_rows,
                                        .epilogue = &kEpilogueKernelsAvx512};

}  // namespace narrowfloat
