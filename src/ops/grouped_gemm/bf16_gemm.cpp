// See bf16_gemm.h.
//
// Rows of other types than bf16 become bf16 in the workspace, at the place where the other
// implementations have fp32. A task takes the strips of a row block one or two at a time, with
// matrix tiles more, which share the copied rows; few rows with E2M1 weights take up to four.
#include "ops/grouped_gemm/bf16_gemm.h"

#include <cstring>

#include "formats/float16.h"
#include "ops/grouped_gemm/input_rows.h"
#include "ops/grouped_gemm/product_range.h"
#include "ops/grouped_gemm/row_blocks.h"
#include "ops/grouped_gemm/strip_decoder.h"
#include "ops/grouped_gemm/strip_epilogue.h"
#include "ops/grouped_gemm/strip_loop.h"
#include "ops/grouped_gemm/strip_weights.h"

namespace narrowfloat {
namespace {

using Lanes = StripEpilogue<float>::Lanes;

constexpr int64_t kLeastBlock = 16;
// Values of a task's rows that are copied for matrix tiles: 128 KiB.
constexpr int64_t kPackedValues = 2 * kBlockRows * kBf16ChunkCols;

// Exact for the values of every format, which have at most eight significant bits.
uint16_t exact_bf16(float value) { return static_cast<uint16_t>(float_bits(value) >> 16); }

// The columns that share factors: blocks of the weights' scales, or else groups of the rows'.
// are_scaled: weights are multiplied by their scales.
int64_t columns_of_block(const GemmShape& shape, bool are_scaled) {
  if (shape.mode.weight_scale == ScaleUse::kNone) return 0;
  const bool has_groups = are_scaled || shape.mode.rounds_weights;
  return has_groups ? shape.mode.group_cols : shape.weight_scales.block_cols;
}

// Whether bf16 has the products of all E2M1 weights and their block scales, as a normal number or
// zero.
bool has_scaled_weights(const GemmShape& shape, const GemmCall& call) {
  if (shape.weights.dtype != DType::kU8 || shape.mode.rounds_weights ||
      shape.mode.weight_scale != ScaleUse::kDecode || call.weight_encoding == 0) {
    return false;
  }
  const MagnitudeRange range = MagnitudeRange::decoded(call.weight_encoding);
  return range.least >= -126 && range.most <= 127;
}

class Bf16Gemm {
 public:
  Bf16Gemm(const GroupedGemmProblem& problem, const GemmCall& call, const Bf16Kernels& kernels,
           const TileGemmKernels* tiles)
      : shape_(problem),
        call_(call),
        kernels_(kernels),
        tiles_(tiles),
        weights_(shape_, call.weights),
        inputs_(shape_, call.workspace + segment_bytes(problem)),
        blocks_(call.tiles, reinterpret_cast<Segment*>(call.workspace)),
        are_scaled_(tiles != nullptr && has_scaled_weights(shape_, call)),
        block_cols_(columns_of_block(shape_, are_scaled_)),
        blocks_per_row_scale_(has_row_scales() ? shape_.mode.group_cols / block_cols_ : 1) {}

  void run() const {
    if (call_.rows.dtype != DType::kBF16) {
      for_each_input_row<float>(shape_, call_, inputs_, [&](int64_t row) {
        dequantize_row(shape_, call_.rows, row, inputs_);
        narrow(inputs_.values(row));
      });
    }
    const int64_t strips = weights_.strips();
    int64_t grain = std::max<int64_t>(1, kGrainProducts / (shape_.cols * kStripRows));
    if (tiles_ != nullptr) grain = std::max(grain, copying_grain(blocks_.count() * strips));
    for_each_strip(blocks_.count(), strips, grain, [&](int64_t block, int64_t strip, int64_t most) {
      return run_strips(block, strip, most);
    });
  }

 private:
  using StripSums = std::array<Lanes, kBf16Strips>;
  // The decoded columns of a chunk, and its factors.
  struct DecodedStrip {
    alignas(64) std::array<uint16_t, kBf16ChunkCols * kStripRows> weights;
    alignas(64) std::array<Lanes, kBf16ChunkCols / kLeastBlock> factors;
  };

  [[nodiscard]] bool has_row_scales() const { return shape_.mode.row_scale == ScaleUse::kGroup; }

  // Replaces the row's fp32 values by their bf16 values, which begin at the same address.
  void narrow(float* values) const {
    auto* bytes = reinterpret_cast<uint8_t*>(values);
    for (int64_t k = 0; k < shape_.cols; ++k) {
      const uint16_t code = exact_bf16(values[k]);
      std::memcpy(bytes + k * 2, &code, sizeof(code));
    }
  }

  // The values of a row of the output.
  [[nodiscard]] const uint16_t* values(int64_t row) const {
    const int64_t source = call_.rows.source(row);
    if (call_.rows.dtype == DType::kBF16) {
      return static_cast<const uint16_t*>(call_.rows.values) + source * shape_.cols;
    }
    return reinterpret_cast<const uint16_t*>(inputs_.values(source));
  }
  // Its scales from `group` on.
  [[nodiscard]] const float* row_scales(int64_t row, int64_t group) const {
    return has_row_scales() ? inputs_.factors(call_.rows.source(row)) + group : nullptr;
  }

  // Computes the first of `strips` strips, or more of them. Returns how many.
  int64_t run_strips(int64_t block_index, int64_t strip, int64_t strips) const {
    RowBlock block;
    blocks_.find(block_index, block);
    if (block.count == 0) return strips;
    const bool decodes_in_registers =
        shape_.weights.dtype == DType::kU8 && !shape_.mode.rounds_weights;
    if (decodes_in_registers && block.count <= kFewBf16Rows) {
      const int64_t count = std::min(strips, kFewBf16Strips);
      run_few_rows(block, strip, count);
      return count;
    }
    if (tiles_ != nullptr && are_scaled_ && block_cols_ == 0) {
      return run_scaled_rows(block, strip, strips);
    }
    if (tiles_ != nullptr) {
      const int64_t count = std::min(strips, kTileTaskStrips);
      run_rows_with_tiles(block, strip, count);
      return count;
    }
    const int64_t count = std::min(strips, kBf16Strips);
    run_rows(block, strip, count);
    return count;
  }

  [[nodiscard]] Bf16StripScale strip_scale() const {
    return shape_.weight_scales.type == ScaleType::kE4M3 ? Bf16StripScale::kE4M3
                                                         : Bf16StripScale::kUE8M0;
  }

  template <size_t kStrips>
  void store(const RowBlock& block, int64_t first_strip, int64_t strips,
             const std::array<Lanes, kStrips>* sums) const {
    store_strips(shape_, call_, block, {first_strip, strips}, side_by_side(sums),
                 kernels_.epilogue);
  }

  void run_few_rows(const RowBlock& block, int64_t first_strip, int64_t strips) const {
    alignas(64) std::array<std::array<Lanes, kFewBf16Strips>, kFewBf16Rows> sums;
    FewBf16Rows task{.cols = shape_.cols,
                     .type = strip_scale(),
                     .block_cols = shape_.weight_scales.block_cols,
                     .blocks_per_row_scale = blocks_per_row_scale_,
                     .strips = strips,
                     .rows = block.count,
                     .codes = {},
                     .scales = {},
                     .values = {},
                     .row_scales = {},
                     .sums = {}};
    for (int64_t i = 0; i < strips; ++i) {
      task.codes[i] = weights_.codes(block.expert, first_strip + i, 0);
      task.scales[i] = weights_.scales(block.expert, first_strip + i, 0);
    }
    for (int64_t i = 0; i < block.count; ++i) {
      const int64_t row = block.rows[static_cast<size_t>(i)];
      task.values[i] = values(row);
      task.row_scales[i] = row_scales(row, 0);
      task.sums[i] = sums[static_cast<size_t>(i)][0].data();
    }
    if (tiles_ != nullptr) {
      const MagnitudeRange range = MagnitudeRange::decoded(call_.weight_encoding);
      tiles_->few_rows.multiply_few_rows({.rows = task,
                                          .is_scaled = are_scaled_,
                                          .least_weight = range.least,
                                          .most_weight = range.most,
                                          .sum_cols = block_cols_});
    } else {
      kernels_.multiply_few_rows(task);
    }
    store(block, first_strip, strips, sums.data());
  }

  void run_rows(const RowBlock& block, int64_t first_strip, int64_t strips) const {
    alignas(64) std::array<StripSums, kBlockRows> sums;
    std::fill_n(sums.begin(), block.count, StripSums{});
    std::array<DecodedStrip, kBf16Strips> decoded;
    std::array<Bf16Row, kBlockRows> rows;
    for (int64_t first = 0; first < shape_.cols; first += kBf16ChunkCols) {
      Bf16Chunk chunk{.strips = strips,
                      .cols = std::min(kBf16ChunkCols, shape_.cols - first),
                      .block_cols = block_cols_,
                      .blocks_per_row_scale = blocks_per_row_scale_};
      for (int64_t i = 0; i < strips; ++i) {
        DecodedStrip& strip = decoded[static_cast<size_t>(i)];
        decode(block.expert, first_strip + i, first, chunk.cols, strip);
        chunk.weights[i] = strip.weights.data();
        chunk.factors[i] = strip.factors[0].data();
      }
      const int64_t first_group = has_row_scales() ? first / shape_.mode.group_cols : 0;
      for (int64_t i = 0; i < block.count; ++i) {
        const int64_t row = block.rows[static_cast<size_t>(i)];
        rows[static_cast<size_t>(i)] = {.values = values(row) + first,
                                        .scales = row_scales(row, first_group),
                                        .sums = sums[static_cast<size_t>(i)][0].data()};
      }
      kernels_.multiply(chunk, rows.data(), block.count);
    }
    store(block, first_strip, strips, sums.data());
  }

  // Weights that are multiplied by their scales, and sums over all columns. Computes as many
  // strips as there is room for the sums of, and returns their number.
  int64_t run_scaled_rows(const RowBlock& block, int64_t first_strip, int64_t strips) const {
    const int64_t groups = ceil_div(block.count, kTileGroupRows);
    ScaledTileTask task{.strips = 0,
                        .group_rows = ceil_div(block.count, groups),
                        .type = strip_scale(),
                        .strip_bytes = shape_.cols * weights_.step_bytes(),
                        .strip_scale_bytes = shape_.weight_scales.blocks * kStripRows};
    task.rows = groups * task.group_rows;
    alignas(64) std::array<Lanes, kTileTaskStrips * kBlockRows> sums;
    task.strips = std::min(strips, static_cast<int64_t>(sums.size()) / task.rows);
    std::fill_n(sums.begin(), task.strips * task.rows, Lanes{});
    task.sums = sums[0].data();
    alignas(64) std::array<uint16_t, kPackedValues> packed;
    task.values = packed.data();
    const int64_t span = packed_span(task.rows);
    tiles_->tiles.configure(task.group_rows);
    for (int64_t begin = 0; begin < shape_.cols; begin += span) {
      task.cols = std::min(span, shape_.cols - begin);
      pack_rows(block, task.rows, begin, begin + task.cols, packed.data());
      task.codes = weights_.codes(block.expert, first_strip, begin);
      task.scales =
          weights_.scales(block.expert, first_strip, begin / shape_.weight_scales.block_cols);
      tiles_->tiles.multiply_scaled(task);
    }
    tiles_->tiles.release();
    store_strips(shape_, call_, block, {first_strip, task.strips},
                 BlockSums<float>{task.sums, kStripRows, task.rows * kStripRows},
                 kernels_.epilogue);
    return task.strips;
  }

  // Packs as many columns of the rows as there is room for: all of them where there are few rows,
  // so that the strips are read one after the other, and else few enough to stay in the cache while
  // the strips are multiplied.
  void run_rows_with_tiles(const RowBlock& block, int64_t first_strip, int64_t strips) const {
    const int64_t groups = ceil_div(block.count, kTileGroupRows);
    TileChunk chunk{.count = block.count,
                    .group_rows = ceil_div(block.count, groups),
                    .block_cols = block_cols_,
                    .blocks_per_row_scale = blocks_per_row_scale_};
    chunk.rows = groups * chunk.group_rows;
    alignas(64) std::array<std::array<Lanes, kTileTaskStrips>, kBlockRows> sums;
    std::fill_n(sums.begin(), chunk.rows, std::array<Lanes, kTileTaskStrips>{});
    alignas(64) std::array<uint16_t, kPackedValues> packed;
    const int64_t span = packed_span(chunk.rows);
    tiles_->tiles.configure(chunk.group_rows);
    for (int64_t begin = 0; begin < shape_.cols; begin += span) {
      const int64_t end = std::min(begin + span, shape_.cols);
      pack_rows(block, chunk.rows, begin, end, packed.data());
      for (int64_t strip = 0; strip < strips; strip += kTileStrips) {
        chunk.strips = std::min(kTileStrips, strips - strip);
        chunk.sums = sums[0][static_cast<size_t>(strip)].data();
        for (int64_t first = begin; first < end; first += kBf16ChunkCols) {
          chunk.values = packed.data() + (first - begin) * chunk.rows;
          multiply_with_tiles(block, first_strip + strip, first,
                              std::min(kBf16ChunkCols, end - first), chunk);
        }
      }
    }
    tiles_->tiles.release();
    store(block, first_strip, strips, sums.data());
  }

  // The columns of so many rows that there is room for.
  static int64_t packed_span(int64_t rows) {
    return kPackedValues / rows / kBf16ChunkCols * kBf16ChunkCols;
  }

  void pack_rows(const RowBlock& block, int64_t rows, int64_t begin, int64_t end,
                 uint16_t* packed) const {
    std::array<const uint16_t*, kBlockRows> from;
    for (int64_t i = 0; i < block.count; ++i) {
      from[static_cast<size_t>(i)] = values(block.rows[static_cast<size_t>(i)]) + begin;
    }
    tiles_->tiles.pack_rows(from.data(), block.count, rows, end - begin, packed);
  }

  // Decodes `cols` columns of the chunk's strips and multiplies the rows with them.
  void multiply_with_tiles(const RowBlock& block, int64_t strip, int64_t first, int64_t cols,
                           TileChunk& chunk) const {
    chunk.cols = round_up(cols, kTileRunCols);
    std::array<const float*, kBlockRows> scales;
    if (has_row_scales()) {
      for (int64_t i = 0; i < block.count; ++i) {
        const int64_t row = block.rows[static_cast<size_t>(i)];
        scales[static_cast<size_t>(i)] = row_scales(row, first / shape_.mode.group_cols);
      }
      chunk.row_scales = scales.data();
    }
    std::array<DecodedStrip, kTileStrips> decoded;
    for (int64_t i = 0; i < chunk.strips; ++i) {
      DecodedStrip& out = decoded[static_cast<size_t>(i)];
      if (are_scaled_) {
        const int64_t scale_cols = shape_.weight_scales.block_cols;
        tiles_->few_rows.decode_scaled(weights_.codes(block.expert, strip + i, first),
                                       weights_.scales(block.expert, strip + i, first / scale_cols),
                                       strip_scale(), cols, out.weights.data());
      } else {
        decode(block.expert, strip + i, first, cols, out);
        std::fill(out.weights.begin() + cols * kStripRows,
                  out.weights.begin() + chunk.cols * kStripRows, uint16_t{0});
        tiles_->few_rows.order(out.weights.data(), chunk.cols);
        chunk.factors[i] = out.factors[0].data();
      }
      chunk.weights[i] = out.weights.data();
    }
    tiles_->tiles.multiply(chunk);
    chunk.row_scales = nullptr;
  }

  // Decodes columns [first, first + count) of a strip and the factors of their blocks.
  void decode(int64_t expert, int64_t strip, int64_t first, int64_t count,
              DecodedStrip& out) const {
    const uint8_t* codes = weights_.codes(expert, strip, first);
    if (shape_.mode.rounds_weights) {
      decode_rounded(expert, strip, first, count, out);
    } else if (shape_.weights.dtype == DType::kU8) {
      kernels_.decode_e2m1(codes, count, out.weights.data());
    } else if (shape_.weights.dtype == DType::kF8E4M3) {
      kernels_.decode_e4m3(codes, count, out.weights.data());
    } else {
      kernels_.decode_bf16(codes, count, out.weights.data());
    }
    if (block_cols_ == 0) return;
    const int64_t blocks = ceil_div(count, block_cols_);
    const int64_t first_block = first / block_cols_;
    if (shape_.mode.rounds_weights) {
      for (int64_t i = 0; i < blocks; ++i) out.factors[static_cast<size_t>(i)].fill(1);
    } else if (shape_.weight_scales.type == ScaleType::kF32) {
      for (int64_t i = 0; i < blocks; ++i) {
        out.factors[static_cast<size_t>(i)].fill(
            weights_.grid_scale(expert, strip, first_block + i));
      }
    } else {
      kernels_.decode_scales(weights_.scales(expert, strip, first_block), blocks, strip_scale(),
                             out.factors[0].data());
    }
  }

  // Weights that are rounded to multiples of E4M3 values, which bf16 has.
  void decode_rounded(int64_t expert, int64_t strip, int64_t first, int64_t count,
                      DecodedStrip& out) const {
    std::array<float, kBf16ChunkCols * kStripRows> values;
    StripDecoder<float>(shape_, weights_, expert, strip).decode(first, count, values.data());
    for (int64_t k = 0; k < count; ++k) {
      for (int64_t row = 0; row < kStripRows; ++row) {
        const float value = values[static_cast<size_t>(k * kStripRows + row)];
        out.weights[static_cast<size_t>((k / 2 * kStripRows + row) * 2 + k % 2)] =
            exact_bf16(value);
      }
    }
  }

  const GemmShape shape_;
  const GemmCall& call_;
  const Bf16Kernels& kernels_;
  const TileGemmKernels* tiles_;
  const StripWeights weights_;
  const InputRows<float> inputs_;
  const RowBlocks blocks_;
  const bool are_scaled_;
  const int64_t block_cols_;
  const int64_t blocks_per_row_scale_;
};

}  // namespace

void run_bf16_gemm(const GroupedGemmProblem& problem, const GemmCall& call,
                   const Bf16Kernels& kernels, const TileGemmKernels* tiles) {
  Bf16Gemm(problem, call, kernels, tiles).run();
}

}  // namespace narrowfloat
