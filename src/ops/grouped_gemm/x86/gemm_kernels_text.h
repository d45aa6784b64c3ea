// The kernels of gemm_kernels.h, written against a level of vector instructions.
//
// Level is a type of an unnamed namespace with
//   kLanes                     fp32 lanes of a vector
//   kRegisterRows              rows whose sums fit the registers beside a strip's weights
//   Floats, Ints, Mask         vectors of fp32, of 32-bit integers, of decisions
//   decode_e2m1(packed)        kLanes values of consecutive codes
//   Unit                       the strips whose codes share a register: kUnitStrips
//   Unit::load(strips, byte)   the 8 bytes of each strip, one a lane
//   Unit::values<kOdd>(codes)  the values of the lower or the upper four bits of the lanes
//   Unit::scales<kOdd>(...)    the scale codes of the same weight rows
//   add_product(sum, a, b)     sum + a * b, rounded twice
// and elementary operations.
#pragma once

#include "formats/x86/decode_text.h"
#include "ops/grouped_gemm/x86/gemm_kernels.h"

namespace narrowfloat::gemm_kernels {

inline constexpr int64_t kStripLanes = 16;
// Bytes of E2M1 codes of a strip at one k.
inline constexpr int64_t kStepBytes = 8;
// Codes are fetched into the cache this many bytes ahead.
inline constexpr int64_t kPrefetchBytes = 1024;

template <class Level>
typename Level::Floats decode_scale(StripScale type, typename Level::Ints codes) {
  return type == StripScale::kE4M3 ? decode_text::decode_e4m3<Level>(codes)
                                   : decode_text::decode_ue8m0<Level>(codes);
}

template <class Level>
void decode_e2m1(const uint8_t* codes, int64_t cols, const StripScales& scales, float* out) {
  constexpr int kVectors = kStripLanes / Level::kLanes;
  constexpr int64_t kVectorBytes = kStepBytes / kVectors;
  const bool has_scales = scales.type != StripScale::kNone;
  const int64_t block_cols = has_scales ? scales.block_cols : cols;
  typename Level::Floats factors[kVectors];
  for (int64_t first = 0; first < cols; first += block_cols) {
    if (has_scales) {
      for (int v = 0; v < kVectors; ++v) {
        const uint8_t* block = scales.codes + first / block_cols * kStripLanes;
        factors[v] = decode_scale<Level>(scales.type, Level::load_bytes(block + v * Level::kLanes));
      }
    }
    const int64_t end = first + block_cols < cols ? first + block_cols : cols;
    for (int64_t k = first; k < end; ++k) {
      for (int v = 0; v < kVectors; ++v) {
        const auto values = Level::decode_e2m1(codes + k * kStepBytes + v * kVectorBytes);
        Level::store(out + k * kStripLanes + v * Level::kLanes,
                     has_scales ? Level::mul(values, factors[v]) : values);
      }
    }
  }
}

template <class Level>
void decode_e4m3(const void* codes, int64_t cols, float* out) {
  const auto* bytes = static_cast<const uint8_t*>(codes);
  for (int64_t i = 0; i < cols * kStripLanes; i += Level::kLanes) {
    Level::store(out + i, decode_text::decode_e4m3<Level>(Level::load_bytes(bytes + i)));
  }
}

template <class Level>
void decode_bf16(const void* codes, int64_t cols, float* out) {
  const auto* words = static_cast<const uint16_t*>(codes);
  for (int64_t i = 0; i < cols * kStripLanes; i += Level::kLanes) {
    const auto bits = Level::template shift_left<16>(Level::load_words(words + i));
    Level::store(out + i, Level::floats(bits));
  }
}

// Sums of kRows rows and one strip.
template <class Level, int kRows>
struct RowSums {
  static constexpr int kVectors = kStripLanes / Level::kLanes;
  typename Level::Floats of[kRows][kVectors];

  void clear() {
    for (int row = 0; row < kRows; ++row) {
      for (int v = 0; v < kVectors; ++v) of[row][v] = Level::floats(0.0F);
    }
  }
  // Adds the products of columns [first, first + count) one after another.
  void add(const float* weights, const RowOperand<float>* rows, int64_t first, int64_t count) {
    for (int64_t k = 0; k < count; ++k, weights += kStripLanes) {
      typename Level::Floats weight[kVectors];
      for (int v = 0; v < kVectors; ++v) weight[v] = Level::load(weights + v * Level::kLanes);
      for (int row = 0; row < kRows; ++row) {
        const auto value = Level::broadcast(rows[row].values + first + k);
        for (int v = 0; v < kVectors; ++v) {
          of[row][v] = Level::add_product(of[row][v], value, weight[v]);
        }
      }
    }
  }
};

template <class Level, int kRows>
void multiply_rows(const WeightChunk<float>& chunk, const RowOperand<float>* rows) {
  using Sums = RowSums<Level, kRows>;
  constexpr int kVectors = Sums::kVectors;
  Sums sums;
  if (chunk.group_cols == 0) {
    for (int row = 0; row < kRows; ++row) {
      for (int v = 0; v < kVectors; ++v) {
        sums.of[row][v] = Level::load(rows[row].sums + v * Level::kLanes);
      }
    }
    sums.add(chunk.weights, rows, 0, chunk.cols);
    for (int row = 0; row < kRows; ++row) {
      for (int v = 0; v < kVectors; ++v) {
        Level::store(rows[row].sums + v * Level::kLanes, sums.of[row][v]);
      }
    }
    return;
  }
  // sums += (row's factor * lane's factor) * (sum over the group), group by group.
  int64_t group = 0;
  for (int64_t k = 0; k < chunk.cols; k += chunk.group_cols, ++group) {
    const int64_t left = chunk.cols - k;
    sums.clear();
    sums.add(chunk.weights + k * kStripLanes, rows, k,
             left < chunk.group_cols ? left : chunk.group_cols);
    for (int v = 0; v < kVectors; ++v) {
      const int64_t lane = v * Level::kLanes;
      const auto strip_factor = Level::load(chunk.factors + group * kStripLanes + lane);
      for (int row = 0; row < kRows; ++row) {
        const auto factor = Level::mul(Level::broadcast(rows[row].factors + group), strip_factor);
        float* total = rows[row].sums + lane;
        // Not fused in any level: this product is not exact.
        Level::store(total, Level::add(Level::load(total), Level::mul(factor, sums.of[row][v])));
      }
    }
  }
}

// The rows that are left, kRows or fewer.
template <class Level, int kRows>
void multiply_rest(const WeightChunk<float>& chunk, const RowOperand<float>* rows, int64_t count) {
  if constexpr (kRows > 0) {
    if (count == kRows) return multiply_rows<Level, kRows>(chunk, rows);
    multiply_rest<Level, kRows - 1>(chunk, rows, count);
  }
}

template <class Level>
void multiply(const WeightChunk<float>& chunk, const RowOperand<float>* rows, int64_t count) {
  constexpr int kRows = Level::kRegisterRows;
  for (; count >= kRows; rows += kRows, count -= kRows) multiply_rows<Level, kRows>(chunk, rows);
  multiply_rest<Level, kRows - 1>(chunk, rows, count);
}

// Even lanes of the sums are weight rows 0, 2, ... of the unit's strips, odd ones 1, 3, ...
template <class Level, int kUnits, int kRows>
void multiply_few_rows(const FewRows& task) {
  using Unit = typename Level::Unit;
  using Floats = typename Level::Floats;
  constexpr int kStrips = Unit::kStrips;
  // A unit's strips beyond the last one repeat that one; their sums are dropped.
  const uint8_t* codes[kUnits][kStrips];
  const uint8_t* scales[kUnits][kStrips];
  for (int unit = 0; unit < kUnits; ++unit) {
    for (int i = 0; i < kStrips; ++i) {
      const int64_t strip = unit * kStrips + i;
      const int64_t source = strip < task.strips ? strip : task.strips - 1;
      codes[unit][i] = task.codes[source];
      scales[unit][i] = task.scales[source];
    }
  }
  Floats sums[kRows][kUnits][2];
  for (int row = 0; row < kRows; ++row) {
    for (int unit = 0; unit < kUnits; ++unit) {
      sums[row][unit][0] = Level::floats(0.0F);
      sums[row][unit][1] = Level::floats(0.0F);
    }
  }
  int64_t scale_byte = 0;
  for (int64_t first = 0; first < task.cols; first += task.block_cols) {
    Floats factors[kUnits][2];
    for (int unit = 0; unit < kUnits; ++unit) {
      factors[unit][0] =
          decode_scale<Level>(task.type, Unit::template scales<false>(scales[unit], scale_byte));
      factors[unit][1] =
          decode_scale<Level>(task.type, Unit::template scales<true>(scales[unit], scale_byte));
      for (int i = 0; i < kStrips; ++i) {
        const uint8_t* ahead = codes[unit][i] + first * kStepBytes + kPrefetchBytes;
        for (int64_t byte = 0; byte < task.block_cols * kStepBytes; byte += 64) {
          __builtin_prefetch(ahead + byte);
        }
      }
    }
    scale_byte += kStripLanes;
    for (int64_t k = first; k < first + task.block_cols; ++k) {
      for (int unit = 0; unit < kUnits; ++unit) {
        const auto packed = Unit::load(codes[unit], k * kStepBytes);
        const Floats even = Level::mul(Unit::template values<false>(packed), factors[unit][0]);
        const Floats odd = Level::mul(Unit::template values<true>(packed), factors[unit][1]);
        for (int row = 0; row < kRows; ++row) {
          const Floats value = Level::broadcast(task.values[row] + k);
          sums[row][unit][0] = Level::add_product(sums[row][unit][0], value, even);
          sums[row][unit][1] = Level::add_product(sums[row][unit][1], value, odd);
        }
      }
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int unit = 0; unit < kUnits; ++unit) {
      float lanes[2][Level::kLanes];
      Level::store(lanes[0], sums[row][unit][0]);
      Level::store(lanes[1], sums[row][unit][1]);
      for (int64_t strip = unit * kStrips; strip < (unit + 1) * kStrips && strip < task.strips;
           ++strip) {
        for (int64_t i = 0; i < kStripLanes; ++i) {
          task.sums[row][strip * kStripLanes + i] =
              lanes[i % 2][(strip - unit * kStrips) * kStripLanes / 2 + i / 2];
        }
      }
    }
  }
}

template <class Level, int kUnits>
void multiply_few_rows_of_units(const FewRows& task) {
  switch (task.rows) {
    case 1:
      return multiply_few_rows<Level, kUnits, 1>(task);
    case 2:
      return multiply_few_rows<Level, kUnits, 2>(task);
    case 3:
      return multiply_few_rows<Level, kUnits, 3>(task);
    default:
      return multiply_few_rows<Level, kUnits, 4>(task);
  }
}

// Strips are independent, so they may go by one or by two units.
template <class Level>
void multiply_few_strips(const FewRows& task) {
  constexpr int64_t kStrips = Level::Unit::kStrips;
  FewRows part = task;
  for (int64_t strip = 0; strip < task.strips; strip += part.strips) {
    const int64_t left = task.strips - strip;
    part.strips = left < 2 * kStrips ? left : 2 * kStrips;
    for (int64_t i = 0; i < part.strips; ++i) {
      part.codes[i] = task.codes[strip + i];
      part.scales[i] = task.scales[strip + i];
    }
    for (int64_t row = 0; row < task.rows; ++row) {
      part.sums[row] = task.sums[row] + strip * kStripLanes;
    }
    if (part.strips > kStrips) {
      multiply_few_rows_of_units<Level, 2>(part);
    } else {
      multiply_few_rows_of_units<Level, 1>(part);
    }
  }
}

// The level with one rounding in place of two.
template <class Level>
struct Fused : Level {
  using Floats = typename Level::Floats;
  static Floats add_product(Floats sum, Floats a, Floats b) { return Level::fma(a, b, sum); }
};

template <class Level>
constexpr GemmKernels gemm_kernels_of() {
  return {.decode_e2m1 = decode_e2m1<Level>,
          .decode_e4m3 = decode_e4m3<Level>,
          .decode_bf16 = decode_bf16<Level>,
          .multiply = multiply<Level>,
          .multiply_few_rows = multiply_few_strips<Level>,
          .fused_multiply = multiply<Fused<Level>>,
          .fused_multiply_few_rows = multiply_few_strips<Fused<Level>>,
          .epilogue = Level::kEpilogue};
}

}  // namespace narrowfloat::gemm_kernels
