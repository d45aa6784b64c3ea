// Stores the codes and scales of a quantization. Shared by the CPU implementations.
#pragma once

#include <algorithm>
#include <cstring>
#include <span>

#include "formats/block_codes.h"
#include "ops/quantize/quantize_problem.h"
#include "tensor/layouts/registry.h"

namespace narrowfloat {

// Padding and skipped rows are zero, so the whole scale tensor is cleared first (spec 1.4).
inline void clear_scales(const ScaleView& scales) {
  if (scales.data == nullptr || scales.capacity == 0) return;
  std::memset(scales.data, 0, static_cast<size_t>(scales.capacity * bytes(scales.type)));
}

// Whether quantizing all rows leaves scales of the buffer unwritten: padding, or rows that are not
// visited.
inline bool has_unwritten_scales(const QuantizeProblem& problem, const ScaleView& scales) {
  const bool skips_rows = problem.has_valid_rows || problem.has_row_list || problem.groups > 0;
  return skips_rows || problem.value_cols != problem.cols ||
         scales.capacity != scales.batch * scales.rows * scales.blocks;
}

// Rows that are not visited have row scale 0.
inline void clear_row_scales(const QuantizeProblem& problem, const QuantizeArgs& args) {
  if (!format_info(problem.format).has_row_scale) return;
  std::fill_n(args.global_scale, problem.batch * problem.rows, 0.0F);
}

// Stores scales [first_block, first_block + scales.size()) of one row of batch `batch`.
template <typename Stored>
void store_scales(const ScaleView& output, int64_t batch, int64_t row, int64_t first_block,
                  std::span<const Stored> scales) {
  if (output.data == nullptr) return;
  auto* base = static_cast<Stored*>(output.data) + batch * (output.capacity / output.batch);
  visit_layout(output.layout, [&]<typename Layout>() {
    int64_t block = first_block;
    for (const Stored scale : scales) {
      base[Layout::offset(row, block++, {output.rows, output.blocks})] = scale;
    }
  });
}

// store_scales() for long runs: swizzled layouts have 4 scales of a row side by side, the linear
// one all.
template <typename Stored>
void store_scale_runs(const ScaleView& output, int64_t batch, int64_t row, int64_t first_block,
                      std::span<const Stored> scales) {
  if (output.data == nullptr) return;
  if (first_block % 4 != 0) return store_scales(output, batch, row, first_block, scales);
  auto* base = static_cast<Stored*>(output.data) + batch * (output.capacity / output.batch);
  const ScaleExtents extents{output.rows, output.blocks};
  const auto store_quads = [&](Stored* quad, int64_t tile) {
    const size_t whole = scales.size() / 4;
    for (size_t i = 0; i < whole; ++i, quad += tile) {
      std::memcpy(quad, scales.data() + 4 * i, 4 * sizeof(Stored));
    }
    std::copy(scales.begin() + static_cast<ptrdiff_t>(4 * whole), scales.end(), quad);
  };
  switch (output.layout) {
    case ScaleLayoutId::kLinear:
      std::copy(scales.begin(), scales.end(),
                base + LinearLayout::offset(row, first_block, extents));
      return;
    case ScaleLayoutId::kSwizzled128x4:
      return store_quads(base + Swizzled128x4Layout::offset(row, first_block, extents),
                         Swizzled128x4Layout::kTileRows * Swizzled128x4Layout::kTileBlocks);
    case ScaleLayoutId::kSwizzled8x4:
      return store_quads(base + Swizzled8x4Layout::offset(row, first_block, extents),
                         Swizzled8x4Layout::kTileRows * Swizzled8x4Layout::kTileBlocks);
    default:
      return store_scales(output, batch, row, first_block, scales);
  }
}

// Packs and stores codes, given one per byte, of columns [col, col + count) of a row of the
// flattened matrix.
template <typename Element>
void store_codes(const QuantizeArgs& args, int64_t row, int64_t col, const uint8_t* codes,
                 int64_t count) {
  pack_codes<Element>(codes, col, count, args.values + row * args.value_row_bytes);
}

// Zeroes the value columns that only pad a row (MXFP8 alignment).
inline void clear_value_padding(const QuantizeProblem& problem, const QuantizeArgs& args,
                                int64_t row) {
  if (problem.value_cols == problem.cols) return;
  std::memset(args.values + row * args.value_row_bytes + problem.cols, 0,
              static_cast<size_t>(problem.value_cols - problem.cols));
}

}  // namespace narrowfloat
