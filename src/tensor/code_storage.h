// Storage of codes and block scales of weights and rows, derived from the formats' own records.
#pragma once

#include <cstdint>
#include <optional>

#include "base/bad_enumerator.h"
#include "base/int_math.h"
#include "narrowfloat/format.h"
#include "narrowfloat/moe_types.h"
#include "tensor/row_format.h"

namespace narrowfloat {

// Codes in memory; U8 is two E2M1 a byte. `scales`: the format of their block scales.
struct CodeStorage {
  DType dtype = DType::kBF16;
  std::optional<FormatId> scales;
};

inline CodeStorage storage_of(WeightFormat format) {
  switch (format) {
    case WeightFormat::kBf16:
      return {DType::kBF16, {}};
    case WeightFormat::kFp8Tensor:
      return {DType::kF8E4M3, {}};
    case WeightFormat::kFp8Block:
      return {DType::kF8E4M3, FormatId::kFp8Block128x128};
    case WeightFormat::kMxfp8:
      return {DType::kF8E4M3, FormatId::kMxfp8};
    case WeightFormat::kMxfp4:
      return {DType::kU8, FormatId::kMxfp4};
    case WeightFormat::kNvfp4:
      return {DType::kU8, FormatId::kNvfp4};
  }
  throw_bad_enumerator("weight format", static_cast<int>(format));
}

inline CodeStorage storage_of(RowFormat format) {
  CodeStorage storage{.dtype = value_dtype(format), .scales = {}};
  if (format == RowFormat::kFp8Group) storage.scales = FormatId::kFp8Block1x128;
  if (format == RowFormat::kMxfp8) storage.scales = FormatId::kMxfp8;
  if (storage.dtype == DType::kU8) storage.scales = FormatId::kNvfp4;
  return storage;
}

inline int code_bits(DType dtype) { return dtype == DType::kU8 ? 4 : bits(dtype); }

// Block scales of a matrix; block_cols is 0 where there are none.
struct ScaleGrid {
  ScaleType type = ScaleType::kF32;
  int64_t block_rows = 1;
  int64_t block_cols = 0;
  int64_t rows = 0;
  int64_t blocks = 0;  // Scales per row of the grid.

  [[nodiscard]] bool is_present() const { return block_cols > 0; }
  [[nodiscard]] int64_t size_bytes() const { return rows * blocks * bytes(type); }
};

inline ScaleGrid scale_grid(const CodeStorage& storage, int64_t rows, int64_t cols) {
  if (!storage.scales) return {};
  const FormatInfo& info = format_info(*storage.scales);
  return {.type = info.scale_type,
          .block_rows = info.block_rows,
          .block_cols = info.block_cols,
          .rows = ceil_div(rows, info.block_rows),
          .blocks = ceil_div(cols, info.block_cols)};
}

}  // namespace narrowfloat
