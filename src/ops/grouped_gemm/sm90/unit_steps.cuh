// The parts of a unit of the weight image (weight_units.h): codes in fragment order, and scales. By
// a block of kPrepareThreads threads, each of which makes what it will hold in the GEMM.
#pragma once

#include "formats/minifloat.h"
#include "ops/grouped_gemm/sm90/row_shifts.cuh"

namespace narrowfloat {

// A pair of e2m1 codes at the places of pair `pair` in a word of eight (fragments.cuh).
__device__ inline uint32_t place_e2m1(uint32_t codes, int pair) {
  uint32_t word = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t code = codes >> (4 * half) & 0xFU;
    const uint32_t sign = code >> 3;
    const uint32_t magnitude = code & 7U;
    const int at = 16 * half;
    if (pair == 0) word |= (magnitude | sign << 9) << at;
    if (pair == 1) word |= (magnitude << 4 | sign << 13) << at;
    if (pair == 2) word |= magnitude << (10 + at) | sign << (3 + 16 - at);
    if (pair == 3) word |= ((magnitude >> 1) << 7 | (magnitude & 1U) << 14 | sign << 15) << at;
  }
  return word;
}

// An E4M3 scale's magnitude as 5 exponent bits (of 2^(e - 10)) and 3 mantissa bits; not for 0.
__device__ inline uint32_t normalized_scale(uint32_t code) {
  const uint32_t magnitude = code & 0x7FU;
  if (magnitude == kE4m3Nan) return 20U << 3 | 1U;
  if (magnitude >= 8) return magnitude + (3U << 3);
  if (magnitude >= 4) return 3U << 3 | (magnitude - 4) << 1;
  if (magnitude >= 2) return 2U << 3 | (magnitude - 2) << 2;
  return 1U << 3;
}

// Codes with the sign of their scale, and zero where the scale is.
__device__ inline uint32_t with_scale_sign(uint32_t codes, uint32_t scale) {
  if ((scale & 0x7FU) == 0) return 0;
  return (scale & 0x80U) != 0 ? codes ^ 0x8888U : codes;
}

// 135 - r of a row's group of 128 columns (moe spec 11.3): r is the least with 6 * largest <= 448 *
// 2^r, 0 if all scales are.
template <class Source>
__device__ inline uint32_t rounding_code(const Source& source, int64_t row) {
  uint32_t largest = 0;
  const int64_t first = source.first_col() / 128 * 8;
  for (int block = 0; block < 8; ++block) {
    const uint32_t magnitude = source.load_scale(row, first + block, 0) & 0x7FU;
    if (magnitude != kE4m3Nan) largest = max(largest, magnitude);
  }
  return static_cast<uint32_t>(135 - rounding_exponent(largest));
}

template <WeightCoding kCoding>
__device__ inline void make_e2m1_codes(const UnitSource<kCoding>& source) {
  constexpr bool kIsNvfp4 = kCoding >= WeightCoding::kNvfp4;
  uint32_t words[4] = {};
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const int64_t row = source.row(pair % 2);
      const int64_t col = source.col(step, pair);
      uint32_t codes = source.load_pair(row, col);
      if constexpr (kIsNvfp4) codes = with_scale_sign(codes, source.load_scale(row, col / 16, 0));
      words[step] |= place_e2m1(codes, pair);
    }
  }
  store(source.unit() + threadIdx.x * 16, uint4{words[0], words[1], words[2], words[3]});
}

// Eight e2m1 codes of a row as fragments_fp8.cuh has them: of two registers.
__device__ inline uint32_t place_e2m1_of_row(uint32_t first, uint32_t second) {
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = first >> (4 * i) & 0xFU;
    const uint32_t high = second >> (4 * i) & 0xFU;
    word |= (low & 7U) << (4 * i) | (low >> 3) << (8 * i + 7);
    word |= (high & 7U) << (16 + 4 * i) | (high >> 3) << (8 * i + 3);
  }
  return word;
}

template <WeightCoding kCoding>
__device__ inline uint32_t load_e2m1_four(const UnitSource<kCoding>& source, int64_t row,
                                          int64_t col) {
  const uint32_t codes = source.load_four(row, col);
  if constexpr (kCoding == WeightCoding::kMxfp4Fp8) return codes;
  return with_scale_sign(codes, source.load_scale(row, col / 16, 0));
}

template <WeightCoding kCoding>
__device__ inline void make_e2m1_rows(const UnitSource<kCoding>& source) {
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int step = 2 * part + i / 2;
      const int64_t row = source.row(i % 2);
      words[i] = place_e2m1_of_row(load_e2m1_four(source, row, source.col(step, 0)),
                                   load_e2m1_four(source, row, source.col(step, 2)));
    }
    store(source.unit() + (part * kPrepareThreads + threadIdx.x) * 16,
          uint4{words[0], words[1], words[2], words[3]});
  }
}

template <WeightCoding kCoding>
__device__ inline void make_wide_codes(const UnitSource<kCoding>& source) {
  constexpr int kSteps = kCoding == WeightCoding::kMxfp8 ? 2 : 1;  // Of 16 bytes.
#pragma unroll
  for (int part = 0; part < 4 / kSteps; ++part) {
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < 4 * kSteps; ++i) {
      const int64_t row = source.row(i % 2);
      const int64_t col = source.col(part * kSteps + i / 4, i % 4);
      if constexpr (kCoding == WeightCoding::kBf16) words[i] = source.load_pair(row, col);
      if constexpr (kSteps == 2) words[i / 2] |= source.load_pair(row, col) << (16 * (i % 2));
    }
    store(source.unit() + (part * kPrepareThreads + threadIdx.x) * 16,
          uint4{words[0], words[1], words[2], words[3]});
  }
}

// [64 rows][128 bytes] in the 128-byte swizzle: 16-byte chunk c of row r lies at c ^ (r % 8).
__device__ inline void make_panel(const UnitSource<WeightCoding::kFp8>& source) {
  constexpr int kPassRows = kPrepareThreads / 8;
  const auto chunk = static_cast<int>(threadIdx.x % 8);
#pragma unroll
  for (int pass = 0; pass < kUnitRows / kPassRows; ++pass) {
    const int place = pass * kPassRows + static_cast<int>(threadIdx.x / 8);
    const int64_t row = source.panel_row(place);
    const int64_t col = source.first_col() + chunk * 16;
    uint4 codes;
    codes.x = source.load_four(row, col);
    codes.y = source.load_four(row, col + 4);
    codes.z = source.load_four(row, col + 8);
    codes.w = source.load_four(row, col + 12);
    store(source.unit() + place * 128 + (chunk ^ place % 8) * 16, codes);
  }
}

// A NaN code makes its row's results NaN whatever the activations: so does a NaN scale, and the
// decode of codes knows no NaN.
__device__ inline bool has_nan(const UnitSource<WeightCoding::kMxfp8>& source, int64_t row,
                               int block) {
  bool found = false;
  for (int i = 0; i < 32; i += 2) {
    const uint32_t codes = source.load_pair(row, source.first_col() + block * 32 + i);
    found = found || (codes & 0x7FU) == kE4m3Nan || (codes >> 8 & 0x7FU) == kE4m3Nan;
  }
  return found;
}

// By two of the four threads that share their rows: thread % 4 is the row.
template <WeightCoding kCoding>
__device__ inline void make_scales(const UnitSource<kCoding>& source) {
  constexpr int kScaleCols = kCoding >= WeightCoding::kNvfp4 ? 16 : 32;
  constexpr int kBlocks = UnitSource<kCoding>::kUnitCols / kScaleCols;
  const int half = static_cast<int>(threadIdx.x % 4);
  if (half >= 2) return;
  const int64_t row = source.row(half);
  uint8_t* scales = source.unit() + unit_code_bytes(kCoding);
  uint8_t* own = scales + threadIdx.x / 4 * (2 * kBlocks) + half * 2;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const int64_t col_block = source.first_col() / kScaleCols + block;
    uint32_t code = source.load_scale(row, col_block, kBlocks == 4 ? 0x38 : 127);
    if constexpr (kBlocks == 4) {
      code = normalized_scale(code);
    } else {
      code = shifted_scale(code, source.row_shift(row));
    }
    // NaN does not fit, and zeros have any scale.
    if constexpr (kCoding == WeightCoding::kMxfp4Near) {
      code = min(code + kNearScaleOffset, uint32_t{kLargestScale});
    }
    if constexpr (kCoding == WeightCoding::kMxfp8) {
      if (has_nan(source, row, block)) code = 0xFF;
    }
    own[block / 2 * 4 + block % 2] = static_cast<uint8_t>(code);
  }
  if constexpr (kCoding == WeightCoding::kNvfp4Rounded) {
    scales[256 + threadIdx.x / 4 * 2 + half] = static_cast<uint8_t>(rounding_code(source, row));
  }
}

// The largest scale of the row gets k = 6, the largest that E4M3 holds with 6, and the others what
// they are below it (moe spec 11.2). Codes of k below -5 and NaN do not fit.
__device__ inline bool make_group_scales(const UnitSource<WeightCoding::kMxfp4Fp8>& source) {
  const int half = static_cast<int>(threadIdx.x % 4);
  if (half >= 2) return true;
  const int64_t row = source.row(half);
  const int largest = source.row_shift(row) + 127 + 6;
  uint8_t* scales = source.unit() + unit_code_bytes(WeightCoding::kMxfp4Fp8);
  bool fits = true;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t block = source.first_col() / 32 + i;
    const auto scale = source.load_scale(row, block, 0);
    const int below = largest - static_cast<int>(scale);
    const bool is_inside = below >= 0 && below <= kMostMxfp4Fp8Spread && scale != kUe8m0Nan;
    fits = fits && (is_inside || (scale != kUe8m0Nan && !has_values(source, row, block)));
    const int shift = is_inside ? kMostMxfp4Fp8Spread - below : 0;
    scales[threadIdx.x / 4 * 8 + half * 4 + i] = static_cast<uint8_t>(8 * shift);
  }
  return fits;
}

// Codes of scale * 2^-r. Half of it must be a normal E4M3 number, unless the scale is 0. So the
// rounding is that of any smaller r, such as that of the group of 128 columns (moe spec 11.3).
__device__ inline bool make_group_scales(const UnitSource<WeightCoding::kNvfp4Fp8>& source) {
  constexpr uint32_t kLeast = 2U << 3;
  const int half = static_cast<int>(threadIdx.x % 4);
  if (half >= 2) return true;
  const int64_t row = source.row(half);
  const auto down = static_cast<uint32_t>(source.row_shift(row));  // r, modulo 2^32.
  uint8_t* scales = source.unit() + unit_code_bytes(WeightCoding::kNvfp4Fp8);
  bool fits = true;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t scale = source.load_scale(row, source.first_col() / 16 + i, 0);
    const bool is_zero = (scale & 0x7FU) == 0;
    const uint32_t normalized = normalized_scale(scale);
    const auto code = static_cast<int>(normalized - ((3U + down) << 3));
    fits = fits && (is_zero || (code >= static_cast<int>(kLeast) && (scale & 0x7FU) != kE4m3Nan));
    const bool is_middle = (normalized & 7U) >= 1 && (normalized & 7U) <= 5;
    const uint32_t stored = static_cast<uint32_t>(code) | (is_middle ? 0x80U : 0U);
    scales[threadIdx.x / 4 * 16 + half * 8 + i] = static_cast<uint8_t>(is_zero ? kLeast : stored);
  }
  return fits;
}

}  // namespace narrowfloat
