// The kernels of int8_kernels.h, written against a level of vector instructions.
//
// Level is a type of an unnamed namespace with
//   kLanes                      32-bit lanes of a vector
//   kRegisterRows, kVectors     rows and vectors of weight rows whose totals fit the registers
//                               beside the weights of a group
//   kChunkCols                  columns that all vectors of weight rows meet before the next ones
//   Floats, Ints                vectors of fp32, of 32-bit integers
//   decode(codes, low, high)    2 * value + 12 of the lower and the upper four bits of each byte
//   add_products(sums, weights, values)
//                               adds weights * values over kQuads times four columns to each
//                               vector; `values` are the codes of a row, the same in all lanes
//   round(x)                    the nearest integers, ties to even
//   store_bytes(out, x)         integers as bytes, one a lane
//   total(x), largest(x)        of all lanes
// and elementary operations.
#pragma once

#include "formats/x86/decode_text.h"
#include "ops/grouped_gemm/x86/int8_kernels.h"

namespace narrowfloat::int8_kernels {

inline constexpr int64_t kStripLanes = 16;
inline constexpr int64_t kBlockCols = 32;
// Columns of a step of packed weights, and its bytes for a strip.
inline constexpr int64_t kStepCols = 8;
inline constexpr int64_t kStepBytes = 64;
// Codes are fetched into the cache this many bytes ahead.
inline constexpr int64_t kPrefetchBytes = 8192;

template <class Value>
Value load_as(const uint8_t* from) {
  Value value;
  __builtin_memcpy(&value, from, sizeof(value));
  return value;
}

// A number that is not negative, without the correction of those that are.
template <int64_t kDivisor>
int64_t unsigned_quotient(int64_t x) {
  return static_cast<int64_t>(static_cast<uint64_t>(x) / kDivisor);
}

struct Columns {
  int64_t begin;
  int64_t end;
};

// Adds the products of the columns to the sums of kRows rows and kVectors vectors of weight rows,
// from vector `first` of the strips on.
template <class Level, int kGroupCols, int kRows, int kVectors>
void multiply_rows(const Int8Strips& strips, const Int8Row* rows, Columns chunk, int64_t first) {
  using Floats = typename Level::Floats;
  using Ints = typename Level::Ints;
  constexpr int kQuads = kGroupCols / 4;
  // The sums of one row wait for each other, so they have a chain for every 16 columns.
  constexpr int kChains = kRows == 1 ? kGroupCols / 16 : 1;
  const int64_t starts = strips.layout.starts;
  const int64_t half_scales = strips.layout.half_scales;
  const int64_t step_bytes = strips.count * kStepBytes;
  const int64_t group_bytes = strips.count * kStripLanes;
  const uint8_t* codes =
      strips.codes + chunk.begin / kStepCols * step_bytes + first * Level::kLanes * 4;
  const uint8_t* scales =
      strips.scales + chunk.begin / kGroupCols * group_bytes + first * Level::kLanes;
  const uint8_t* data[kRows];
  Floats totals[kRows][kVectors];
  for (int row = 0; row < kRows; ++row) {
    data[row] = rows[row].data;
    for (int v = 0; v < kVectors; ++v) {
      const float* sums = rows[row].sums + (first + v) * Level::kLanes;
      totals[row][v] = chunk.begin == 0 ? Level::floats(0.0F) : Level::load(sums);
    }
  }
  Ints weights[kQuads][kVectors];
  const auto decode_quads = [&](int first_quad, int end_quad) {
    for (int quad = first_quad; quad < end_quad; quad += 2) {
      for (int v = 0; v < kVectors; ++v) {
        const uint8_t* bytes = codes + v * Level::kLanes * 4;
        if (v * Level::kLanes * 4 % kStepBytes == 0) __builtin_prefetch(bytes + kPrefetchBytes);
        Level::decode(bytes, weights[quad][v], weights[quad + 1][v]);
      }
      codes += step_bytes;
    }
  };
  for (int64_t begin = chunk.begin; begin < chunk.end; begin += kGroupCols) {
    const int64_t group = unsigned_quotient<kGroupCols>(begin);
    const int64_t block = unsigned_quotient<kBlockCols>(begin);
    Floats weight_scales[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const Ints scale_codes = Level::load_bytes(scales + v * Level::kLanes);
      weight_scales[v] = kGroupCols == 32 ? decode_text::decode_ue8m0<Level>(scale_codes)
                                          : decode_text::decode_e4m3<Level>(scale_codes);
    }
    scales += group_bytes;
    // One row takes its weights as they are decoded, so that few registers hold them.
    if (kRows > 1) decode_quads(0, kQuads);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      Ints inner[kChains][kVectors];
#pragma GCC unroll 2
      for (int chain = 0; chain < kChains; ++chain) {
        const int quad = chain * kQuads / kChains;
        if (kRows == 1) decode_quads(quad, quad + kQuads / kChains);
        const int32_t start = chain == 0 ? load_as<int32_t>(data[row] + starts + group * 4) : 0;
        for (int v = 0; v < kVectors; ++v) inner[chain][v] = Level::ints(start);
        Level::template add_products<kQuads / kChains, kVectors>(inner[chain], weights + quad,
                                                                 data[row] + begin + quad * 4);
      }
      const auto half_scale = load_as<float>(data[row] + half_scales + block * 4);
      for (int v = 0; v < kVectors; ++v) {
        const Floats factor = Level::mul(Level::floats(half_scale), weight_scales[v]);
        Ints sum = inner[0][v];
        for (int chain = 1; chain < kChains; ++chain) sum = Level::add(sum, inner[chain][v]);
        totals[row][v] = Level::add(totals[row][v], Level::mul(factor, Level::to_floats(sum)));
      }
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kVectors; ++v) {
      Level::store(rows[row].sums + (first + v) * Level::kLanes, totals[row][v]);
    }
  }
}

// The rows of one register block.
template <class Level, int kGroupCols, int kRows>
void multiply_block(const Int8Strips& strips, const Int8Row* rows) {
  // One row takes the time of reading the strips, so it meets their codes as one stream.
  constexpr int kVectors = kRows == 1 ? 2 * kStripLanes / Level::kLanes : Level::kVectors;
  const int64_t vectors = strips.count * kStripLanes / Level::kLanes;
  for (int64_t chunk = 0; chunk < strips.layout.cols;) {
    const int64_t left = strips.layout.cols - chunk;
    const int64_t end = chunk + (left < Level::kChunkCols ? left : Level::kChunkCols);
    int64_t first = 0;
    for (; first + kVectors <= vectors; first += kVectors) {
      multiply_rows<Level, kGroupCols, kRows, kVectors>(strips, rows, {chunk, end}, first);
    }
    if constexpr (kVectors > 1) {
      for (; first < vectors; ++first) {
        multiply_rows<Level, kGroupCols, kRows, 1>(strips, rows, {chunk, end}, first);
      }
    }
    chunk = end;
  }
}

// kRows rows or fewer.
template <class Level, int kGroupCols, int kRows>
void multiply_some(const Int8Strips& strips, const Int8Row* rows, int64_t count) {
  if constexpr (kRows > 0) {
    if (count == kRows) return multiply_block<Level, kGroupCols, kRows>(strips, rows);
    multiply_some<Level, kGroupCols, kRows - 1>(strips, rows, count);
  }
}

template <class Level>
void multiply(const Int8Strips& strips, const Int8Row* rows, int64_t count) {
  constexpr int64_t kMost = Level::kRegisterRows;
  // Register blocks of nearly equal size.
  for (int64_t left = (count + kMost - 1) / kMost; left > 0; --left) {
    const int64_t some = (count + left - 1) / left;
    if (strips.layout.group_cols == 32) {
      multiply_some<Level, 32, kMost>(strips, rows, some);
    } else {
      multiply_some<Level, 16, kMost>(strips, rows, some);
    }
    rows += some;
    count -= some;
  }
}

// The largest magnitude of a block, as the bits of fp32; that of NaN is above infinity.
template <class Level>
int32_t largest_bits(const uint16_t* values) {
  auto largest = Level::ints(0);
  for (int i = 0; i < kBlockCols; i += Level::kLanes) {
    const auto bits = Level::template shift_left<16>(Level::load_words(values + i));
    largest = Level::larger(largest, Level::bit_and(bits, INT32_MAX));
  }
  return Level::largest(largest);
}

template <class Level>
void round_row(const uint16_t* values, const Int8RowLayout& layout, uint8_t* out) {
  constexpr int32_t kInfinity = 0x7F800000;
  constexpr int32_t kLeast = (127 - 100) << 23;  // kLeastInt8Maximum
  const int64_t group_cols = layout.group_cols;
  for (int64_t first = 0; first < layout.cols; first += kBlockCols) {
    int32_t bits = largest_bits<Level>(values + first);
    const bool is_finite = bits < kInfinity;
    if (bits < kLeast) bits = kLeast;
    float largest = 0;
    __builtin_memcpy(&largest, &bits, sizeof(largest));
    const float multiplier = is_finite ? 127.0F / largest : 0.0F;
    const float half_scale = is_finite ? 0.5F * (1.0F / multiplier) : __builtin_nanf("");
    __builtin_memcpy(out + layout.half_scales + first / kBlockCols * 4, &half_scale, 4);
    for (int64_t group = first; group < first + kBlockCols; group += group_cols) {
      auto sums = Level::ints(0);
      for (int64_t i = group; i < group + group_cols; i += Level::kLanes) {
        const auto words = Level::template shift_left<16>(Level::load_words(values + i));
        // Zero times infinity is NaN, which is no integer.
        const auto codes =
            is_finite ? Level::round(Level::mul(Level::floats(words), Level::floats(multiplier)))
                      : Level::ints(0);
        sums = Level::add(sums, codes);
        Level::store_bytes(out + i, codes);
      }
      const int32_t start = -kInt8Offset * Level::total(sums);
      __builtin_memcpy(out + layout.starts + group / group_cols * 4, &start, 4);
    }
  }
}

template <class Level>
constexpr Int8Kernels int8_kernels_of() {
  return {.round_row = round_row<Level>, .multiply = multiply<Level>, .epilogue = Level::kEpilogue};
}

}  // namespace narrowfloat::int8_kernels
