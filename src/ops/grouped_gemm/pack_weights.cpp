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

// Interleaves 4-bit codes by four columns; `rows` are those of strip `strip`, `out` is the place of
// its expert.
void interleave_pair(const GemmShape& shape, const uint8_t* rows, int64_t strip, uint8_t* out) {
  const StripPair pair(shape, strip);
  for (int64_t k = 0; k < shape.cols; k += kPairStepCols) {
    uint8_t* step = out + pair.codes(k);
    for (int64_t row = 0; row < kStripRows; ++row) {
      const uint8_t* codes = rows + row * shape.cols / 2;
      for (int64_t i = k; i < k + 4; ++i) {
        *step++ = static_cast<uint8_t>(code_at(codes, i) | code_at(codes, i + 4) << 4);
      }
    }
  }
}

void copy_codes(const GemmShape& shape, const uint8_t* values, int64_t strip, uint8_t* packed) {
  const int64_t stride = shape.cols * code_bits(shape.weights.dtype) / 8;
  const uint8_t* rows = values + strip * kStripRows * stride;
  uint8_t* out = packed + strip * kStripRows * stride;
  if (shape.weights.dtype == DType::kBF16)
    return interleave<uint16_t>(rows, stride, shape.cols, out);
  if (shape.weights.dtype == DType::kF8E4M3)
    return interleave<uint8_t>(rows, stride, shape.cols, out);
  if (shape.mode.has_int8_rows) {
    const int64_t strips = shape.rows / kStripRows;
    uint8_t* expert = packed + strip / strips * shape.expert_code_bytes();
    return interleave_pair(shape, rows, strip % strips, expert);
  }
  interleave_packed(rows, stride, shape.cols, out);
}

// Copies the byte scales of the 16 rows of a source's strip; `out` is the place of its first strip.
void copy_scales(const GemmShape& shape, const ScaleView& scales, int64_t strip, uint8_t* out) {
  const int64_t strips = shape.rows / kStripRows;
  const int64_t blocks = shape.weight_scales.blocks;
  const StripPair pair(shape, strip % strips);
  out += strip / strips * shape.weight_scales.size_bytes();
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t place = shape.mode.has_int8_rows ? pair.scales(block)
                                                   : (strip % strips * blocks + block) * kStripRows;
    for (int64_t row = 0; row < kStripRows; ++row) {
      out[place + row] =
          *scale_address(scales, strip / strips, strip % strips * kStripRows + row, block);
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
MagnitudeRange range_of_scaled_codes(const GemmShape& shape, const WeightSource& source,
                                     int64_t strip, const uint8_t* packed_scales) {
  constexpr int kSmallScale = UE8M0::kBias - 60;
  const bool is_ue8m0 = shape.weight_scales.type == ScaleType::kUE8M0;
  const int64_t blocks = shape.weight_scales.blocks;
  const uint8_t* scales = packed_scales + strip * blocks * kStripRows;
  int least = std::numeric_limits<int>::max();
  int most = std::numeric_limits<int>::min();
  for (int64_t i = 0; i < blocks * kStripRows; ++i) {
    const int code = is_ue8m0 ? scales[i] : static_cast<int>(scales[i] & E4M3::kMagnitudeMask);
    if (is_ue8m0 ? code > UE8M0::kMaxCode : code == 0 || code == E4M3::kNanCode) continue;
    const int64_t row = strip * kStripRows + i % kStripRows;
    if (is_ue8m0 && code < kSmallScale && is_zero_block(shape, source, row, i / kStripRows)) {
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

// The magnitudes of a source's strip as they are multiplied; `packed_scales` are those of the
// source.
MagnitudeRange range_of_strip(const GemmShape& shape, const WeightSource& source, int64_t strip,
                              const uint8_t* packed_scales) {
  if (shape.weights.dtype == DType::kBF16) {
    const int64_t elems = kStripRows * shape.cols;
    return range_of_bf16(reinterpret_cast<const uint16_t*>(source.values) + strip * elems, elems);
  }
  if (shape.weights.dtype == DType::kF8E4M3) return {.least = -9, .most = 8};
  if (shape.mode.weight_scale != ScaleUse::kDecode) return {.least = -1, .most = 2};
  return range_of_scaled_codes(shape, source, strip, packed_scales);
}

// The place of the codes and scales of the experts from `first` on in the packed weights.
struct PackedPlace {
  uint8_t* codes;
  uint8_t* scales;

  PackedPlace(const GemmShape& shape, uint8_t* packed, int64_t first)
      : codes(packed + first * shape.expert_code_bytes()),
        scales(packed + shape.code_bytes() + first * shape.weight_scales.size_bytes()) {}
};

// Calls fill(place, source) for all sources.
PackedWeightData pack_weights(
    const GemmShape& shape, const WeightPieces& pieces,
    FunctionRef<void(const PackedPlace& place, const WeightSource& source)> fill) {
  const auto packed = allocate_packed(shape.packed_bytes(), shape.mode.has_int8_rows);
  for (int64_t first = 0; first < shape.experts; first += pieces.experts) {
    fill(PackedPlace(shape, packed.get(), first), pieces.from(first));
  }
  return {.bytes = packed, .size_bytes = shape.packed_bytes()};
}

}  // namespace

PackedWeightData pack_linear_weights(const GroupedGemmProblem& problem, const WeightPieces& pieces,
                                     Stream /*stream*/) {
  const GemmShape shape(problem);
  return pack_weights(shape, pieces, [&](const PackedPlace& place, const WeightSource& source) {
    std::memcpy(place.codes, source.values,
                static_cast<size_t>(pieces.experts * shape.expert_code_bytes()));
    uint8_t* out = place.scales;
    const ScaleGrid& grid = shape.weight_scales;
    for (int64_t row = 0; row < pieces.experts * grid.rows; ++row) {
      for (int64_t block = 0; block < grid.blocks; ++block, out += bytes(grid.type)) {
        std::memcpy(out, scale_address(source.scales, row / grid.rows, row % grid.rows, block),
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
  PackedWeightData packed =
      pack_weights(shape, pieces, [&](const PackedPlace& place, const WeightSource& source) {
        const int64_t strips = shape.rows / kStripRows;
        for_each_strip(pieces.experts, strips, 1, [&](int64_t expert, int64_t first, int64_t most) {
          MagnitudeRange of_task;
          for (int64_t i = first; i < first + most; ++i) {
            const int64_t strip = expert * strips + i;
            copy_codes(shape, source.values, strip, place.codes);
            if (has_byte_scales) copy_scales(shape, source.scales, strip, place.scales);
            of_task.add(range_of_strip(shape, source, strip, place.scales));
          }
          const std::lock_guard lock(mutex);
          range.add(of_task);
          return most;
        });
        if (grid.is_present() && !has_byte_scales) {
          std::memcpy(place.scales, source.scales.data,
                      static_cast<size_t>(pieces.experts * grid.size_bytes()));
        }
      });
  // Rounded weights have factors of their own.
  if (!shape.mode.rounds_weights) packed.encoding = range.encoded();
  return packed;
}

}  // namespace narrowfloat
