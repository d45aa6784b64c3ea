// See pack_weights.h.
#include "ops/grouped_gemm/pack_weights.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>

#include "formats/minifloat.h"
#include "formats/ue8m0.h"
#include "ops/grouped_gemm/product_range.h"
#include "ops/grouped_gemm/strip_loop.h"
#include "ops/grouped_gemm/strip_weights.h"
#include "tensor/layouts/linear.h"
#include "tensor/layouts/swizzled_128x4.h"

namespace narrowfloat {
namespace {

// The memory is not initialised: the threads that fill it touch its pages first.
std::shared_ptr<uint8_t> allocate_packed(int64_t size_bytes, bool has_large_pages) {
  constexpr int64_t kLargePage = 2 << 20;
  const auto size = static_cast<size_t>(std::max<int64_t>(1, size_bytes));
  const std::align_val_t alignment{static_cast<size_t>(
      has_large_pages && size_bytes >= kLargePage ? kLargePage : kGemmAlignment)};
  auto* packed = static_cast<uint8_t*>(::operator new(size, alignment));
#if defined(__linux__)
  // Many systems give them on request alone. A refusal is no error.
  if (has_large_pages && size_bytes >= kLargePage) madvise(packed, size, MADV_HUGEPAGE);
#endif
  return {packed, [alignment](uint8_t* memory) { ::operator delete(memory, alignment); }};
}

// The address of the scale of (row, block) of an expert's grid, linear or swizzled_128x4, as
// checked.
const uint8_t* scale_address(const ScaleView& scales, int64_t expert, int64_t row, int64_t block) {
  const ScaleExtents extents{scales.rows, scales.blocks};
  const int64_t offset = scales.layout == ScaleLayoutId::kLinear
                             ? LinearLayout::offset(row, block, extents)
                             : Swizzled128x4Layout::offset(row, block, extents);
  const int64_t expert_scales = scales.capacity / scales.batch;
  return static_cast<const uint8_t*>(scales.data) +
         (expert * expert_scales + offset) * bytes(scales.type);
}

// Interleaves 16 rows of codes, which are `stride` bytes apart.
template <typename Code>
void interleave(const uint8_t* rows, int64_t stride, int64_t cols, uint8_t* out) {
  for (int64_t k = 0; k < cols; ++k) {
    for (int64_t row = 0; row < kStripRows; ++row, out += sizeof(Code)) {
      std::memcpy(out, rows + row * stride + k * static_cast<int64_t>(sizeof(Code)), sizeof(Code));
    }
  }
}

// Interleaves 4-bit codes: from two columns per byte to two rows per byte.
void interleave_packed(const uint8_t* rows, int64_t stride, int64_t cols, uint8_t* out) {
  for (int64_t k = 0; k < cols; k += 2) {
    for (int64_t j = 0; j < kStripRows / 2; ++j) {
      const unsigned low = rows[2 * j * stride + k / 2];
      const unsigned high = rows[(2 * j + 1) * stride + k / 2];
      out[k * kStripRows / 2 + j] = static_cast<uint8_t>((low & 0xFU) | ((high & 0xFU) << 4));
      out[(k + 1) * kStripRows / 2 + j] = static_cast<uint8_t>((low >> 4) | (high & 0xF0U));
    }
  }
}

// The 4-bit code of a column, which is the only one in its byte's lower bits.
uint8_t code_at(const uint8_t* row, int64_t k) {
  return static_cast<uint8_t>((row[k / 2] >> (k % 2 * 4)) & 0xF);
}

// Interleaves 4-bit codes by four columns.
void interleave_pair(const StripPair& pair, const uint8_t* rows, int64_t cols, uint8_t* out) {
  for (int64_t k = 0; k < cols; k += kPairStepCols) {
    uint8_t* step = out + pair.codes(k);
    for (int64_t row = 0; row < kStripRows; ++row) {
      const uint8_t* codes = rows + row * cols / 2;
      for (int64_t i = k; i < k + 4; ++i) {
        *step++ = static_cast<uint8_t>(code_at(codes, i) | code_at(codes, i + 4) << 4);
      }
    }
  }
}

// A strip of a source, and where it goes.
struct PackedStrip {
  const GemmShape& shape;
  const WeightSource& source;
  int64_t source_strip;  // Strips are counted over the source's experts here,
  int64_t expert;
  int64_t strip;  // and over those of this expert here.

  [[nodiscard]] int64_t place() const { return strip_places(shape).of(expert, strip); }
};

void copy_codes(const PackedStrip& of, uint8_t* codes) {
  const GemmShape& shape = of.shape;
  const int64_t stride = shape.cols * code_bits(shape.weights.dtype) / 8;
  const uint8_t* rows = of.source.values + of.source_strip * kStripRows * stride;
  if (shape.mode.has_int8_rows) {
    return interleave_pair(StripPair(shape, of.expert, of.strip), rows, shape.cols, codes);
  }
  uint8_t* out = codes + of.place() * kStripRows * stride;
  if (shape.weights.dtype == DType::kBF16)
    return interleave<uint16_t>(rows, stride, shape.cols, out);
  if (shape.weights.dtype == DType::kF8E4M3)
    return interleave<uint8_t>(rows, stride, shape.cols, out);
  interleave_packed(rows, stride, shape.cols, out);
}

// Copies the byte scales of the 16 rows of a strip.
void copy_scales(const PackedStrip& of, uint8_t* scales) {
  const int64_t strips = of.shape.rows / kStripRows;
  const int64_t blocks = of.shape.weight_scales.blocks;
  const StripPair pair(of.shape, of.expert, of.strip);
  const int64_t first = of.place() * blocks * kStripRows;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t place =
        of.shape.mode.has_int8_rows ? pair.scales(block) : first + block * kStripRows;
    for (int64_t row = 0; row < kStripRows; ++row) {
      scales[place + row] = *scale_address(of.source.scales, of.source_strip / strips,
                                           of.strip * kStripRows + row, block);
    }
  }
}

// Blocks of zeros may have any scale.
bool is_zero_block(const GemmShape& shape, const WeightSource& source, int64_t row, int64_t block) {
  const int64_t bytes = shape.weight_scales.block_cols / 2;
  const uint8_t* codes = source.values + row * (shape.cols / 2) + block * bytes;
  return std::all_of(codes, codes + bytes, [](uint8_t pair) { return (pair & 0x77U) == 0; });
}

// The magnitudes of the products of E2M1 codes, 1/2 to 6, and the scales of a strip.
MagnitudeRange range_of_scaled_codes(const PackedStrip& of, const uint8_t* packed_scales) {
  const GemmShape& shape = of.shape;
  constexpr int kSmallScale = UE8M0::kBias - 60;
  const bool is_ue8m0 = shape.weight_scales.type == ScaleType::kUE8M0;
  const int64_t blocks = shape.weight_scales.blocks;
  const uint8_t* scales = packed_scales + of.place() * blocks * kStripRows;
  int least = std::numeric_limits<int>::max();
  int most = std::numeric_limits<int>::min();
  for (int64_t i = 0; i < blocks * kStripRows; ++i) {
    const int code = is_ue8m0 ? scales[i] : static_cast<int>(scales[i] & E4M3::kMagnitudeMask);
    if (is_ue8m0 ? code > UE8M0::kMaxCode : code == 0 || code == E4M3::kNanCode) continue;
    const int64_t row = of.source_strip * kStripRows + i % kStripRows;
    if (is_ue8m0 && code < kSmallScale && is_zero_block(shape, of.source, row, i / kStripRows)) {
      continue;
    }
    least = std::min(least, code);
    most = std::max(most, code);
  }
  if (least > most) return {};
  if (is_ue8m0) return {.least = least - UE8M0::kBias - 1, .most = most - UE8M0::kBias + 2};
  const auto exponent = [](int code) {
    return static_cast<int>(float_bits(E4M3::decode(static_cast<uint8_t>(code))) >> 23) - 127;
  };
  return {.least = exponent(least) - 1, .most = exponent(most) + 3};
}

MagnitudeRange range_of_bf16(const uint16_t* values, int64_t count) {
  constexpr int kInfinity = 0x7F80;
  int least = kInfinity;
  int most = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int magnitude = values[i] & 0x7FFF;
    const bool counts = magnitude != 0 && magnitude < kInfinity;
    least = counts ? std::min(least, magnitude) : least;
    most = counts ? std::max(most, magnitude) : most;
  }
  if (least > most) return {};
  const int least_exponent = (least >> 7) - 127;
  // Denormals begin at 2^-133.
  return {.least = least < 0x80 ? -133 : least_exponent, .most = (most >> 7) - 127};
}

// The magnitudes of a strip as they are multiplied.
MagnitudeRange range_of_strip(const PackedStrip& of, const uint8_t* packed_scales) {
  const GemmShape& shape = of.shape;
  if (shape.weights.dtype == DType::kBF16) {
    const int64_t elems = kStripRows * shape.cols;
    const auto* values = reinterpret_cast<const uint16_t*>(of.source.values);
    return range_of_bf16(values + of.source_strip * elems, elems);
  }
  if (shape.weights.dtype == DType::kF8E4M3) return {.least = -9, .most = 8};
  if (shape.mode.weight_scale != ScaleUse::kDecode) return {.least = -1, .most = 2};
  return range_of_scaled_codes(of, packed_scales);
}

// Experts of a source, from `first` on, and the packed weights of all experts.
struct PackedPiece {
  const WeightSource& source;
  int64_t first;
  uint8_t* codes;
  uint8_t* scales;
};

// Calls fill(piece) for all sources.
PackedWeightData pack_weights(const GemmShape& shape, const WeightPieces& pieces,
                              FunctionRef<void(const PackedPiece& piece)> fill) {
  const auto packed = allocate_packed(shape.packed_bytes(), shape.mode.has_int8_rows);
  for (int64_t first = 0; first < shape.experts; first += pieces.experts) {
    const WeightSource source = pieces.from(first);
    fill({.source = source,
          .first = first,
          .codes = packed.get(),
          .scales = packed.get() + shape.code_bytes()});
  }
  return {.bytes = packed, .size_bytes = shape.packed_bytes()};
}

}  // namespace

PackedWeightData pack_linear_weights(const GroupedGemmProblem& problem, const WeightPieces& pieces,
                                     Stream /*stream*/) {
  const GemmShape shape(problem);
  return pack_weights(shape, pieces, [&](const PackedPiece& piece) {
    std::memcpy(piece.codes + piece.first * shape.expert_code_bytes(), piece.source.values,
                static_cast<size_t>(pieces.experts * shape.expert_code_bytes()));
    const ScaleGrid& grid = shape.weight_scales;
    uint8_t* out = piece.scales + piece.first * grid.size_bytes();
    for (int64_t row = 0; row < pieces.experts * grid.rows; ++row) {
      for (int64_t block = 0; block < grid.blocks; ++block, out += bytes(grid.type)) {
        std::memcpy(out,
                    scale_address(piece.source.scales, row / grid.rows, row % grid.rows, block),
                    static_cast<size_t>(bytes(grid.type)));
      }
    }
  });
}

PackedWeightData pack_weight_strips(const GroupedGemmProblem& problem, const WeightPieces& pieces,
                                    Stream /*stream*/) {
  const GemmShape shape(problem);
  const ScaleGrid& grid = shape.weight_scales;
  const bool has_byte_scales = grid.is_present() && grid.block_rows == 1;
  std::mutex mutex;
  MagnitudeRange range;
  PackedWeightData packed = pack_weights(shape, pieces, [&](const PackedPiece& piece) {
    const int64_t strips = shape.rows / kStripRows;
    for_each_strip(pieces.experts, strips, 1, [&](int64_t expert, int64_t first, int64_t most) {
      MagnitudeRange of_task;
      for (int64_t i = first; i < first + most; ++i) {
        const PackedStrip strip{.shape = shape,
                                .source = piece.source,
                                .source_strip = expert * strips + i,
                                .expert = piece.first + expert,
                                .strip = i};
        copy_codes(strip, piece.codes);
        if (has_byte_scales) copy_scales(strip, piece.scales);
        of_task.add(range_of_strip(strip, piece.scales));
      }
      const std::lock_guard lock(mutex);
      range.add(of_task);
      return most;
    });
    if (grid.is_present() && !has_byte_scales) {
      std::memcpy(piece.scales + piece.first * grid.size_bytes(), piece.source.scales.data,
                  static_cast<size_t>(pieces.experts * grid.size_bytes()));
    }
  });
  // Rounded weights have factors of their own.
  if (!shape.mode.rounds_weights) packed.encoding = range.encoded();
  return packed;
}

}  // namespace narrowfloat
