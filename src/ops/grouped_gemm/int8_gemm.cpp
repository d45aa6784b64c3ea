// See int8_gemm.h.
//
// Rows in int8 stand in the workspace in the place of fp32 ones, closer together. A task takes the
// strips of a row block in pairs, with matrix tiles up to eight pairs, which share the copied rows.
#include "ops/grouped_gemm/int8_gemm.h"

#include <cstring>

#include "ops/grouped_gemm/input_rows.h"
#include "ops/grouped_gemm/int8_rows.h"
#include "ops/grouped_gemm/row_blocks.h"
#include "ops/grouped_gemm/strip_epilogue.h"
#include "ops/grouped_gemm/strip_loop.h"
#include "ops/grouped_gemm/strip_weights.h"

namespace narrowfloat {
namespace {

using Lanes = StripEpilogue<float>::Lanes;

// Fewer rows of an expert are multiplied by vectors faster than by tiles, whose sums take a way
// through memory.
constexpr int64_t kLeastTileRows = 33;
// Codes of a task's rows that are copied for matrix tiles.
constexpr int64_t kPackedCodes = 128 << 10;

Int8RowLayout layout_of(const GemmShape& shape) {
  const int64_t start_bytes = shape.groups * static_cast<int64_t>(sizeof(int32_t));
  return {.cols = shape.cols,
          .group_cols = shape.group_cols,
          .starts = shape.cols,
          .half_scales = shape.cols + start_bytes};
}

// An odd number of cache lines, so that the rows of a register block do not compete for the same
// ones. It is less than fp32 values and factors take.
int64_t row_stride(const GemmShape& shape) {
  constexpr int64_t kLine = 64;
  const int64_t scale_bytes = shape.cols / kInt8BlockCols * static_cast<int64_t>(sizeof(float));
  const int64_t lines = ceil_div(layout_of(shape).half_scales + scale_bytes, kLine);
  return (lines | 1) * kLine;
}

class Int8Gemm {
 public:
  Int8Gemm(const GroupedGemmProblem& problem, const GemmCall& call, const Int8Kernels& kernels,
           const Int8TileKernels* tiles)
      : shape_(problem),
        call_(call),
        kernels_(kernels),
        tiles_(tiles),
        weights_(shape_, call.weights),
        inputs_(shape_, call.workspace + segment_bytes(problem), row_stride(shape_)),
        blocks_(call.tiles, reinterpret_cast<Segment*>(call.workspace)),
        layout_(layout_of(shape_)) {}

  void run() const {
    for_each_input_row<float>(shape_, call_, inputs_, [&](int64_t row) { round(row); });
    const int64_t pairs = ceil_div(weights_.strips(), kPairStrips);
    const int64_t products = shape_.cols * kStripRows * kPairStrips;
    int64_t grain = std::max<int64_t>(1, kGrainProducts / products);
    if (tiles_ != nullptr) grain = std::max(grain, copying_grain(blocks_.count() * pairs));
    const auto run = [&](int64_t block, int64_t pair, int64_t most) {
      return run_pairs(block, pair, most);
    };
    for_each_strip(blocks_.count(), pairs, grain, run, kNodeStrips / kPairStrips);
  }

 private:
  [[nodiscard]] uint8_t* data(int64_t row) const {
    return reinterpret_cast<uint8_t*>(inputs_.values(row));
  }

  void round(int64_t row) const {
    if (call_.rows.dtype == DType::kBF16) {
      const auto* values = static_cast<const uint16_t*>(call_.rows.values) + row * shape_.cols;
      return kernels_.round_row(values, layout_, data(row));
    }
    round_fp32(static_cast<const float*>(call_.rows.values) + row * shape_.cols, data(row));
  }

  void round_fp32(const float* values, uint8_t* out) const {
    for (int64_t first = 0; first < shape_.cols; first += kInt8BlockCols) {
      const Int8Block block = int8_block(values + first, kInt8BlockCols);
      std::memcpy(out + layout_.half_scales + first / kInt8BlockCols * 4, &block.half_scale, 4);
      for (int64_t group = first; group < first + kInt8BlockCols; group += shape_.group_cols) {
        int32_t sum = 0;
        for (int64_t k = group; k < group + shape_.group_cols; ++k) {
          const auto code = static_cast<int32_t>(int8_code(values[k], block));
          out[k] = static_cast<uint8_t>(code);
          sum += code;
        }
        const int32_t start = -kInt8Offset * sum;
        std::memcpy(out + layout_.starts + group / shape_.group_cols * 4, &start, 4);
      }
    }
  }

  // Computes the first of `pairs` pairs, or more of them. Returns how many.
  int64_t run_pairs(int64_t block_index, int64_t pair, int64_t pairs) const {
    RowBlock block;
    blocks_.find(block_index, block);
    if (block.count == 0) return pairs;
    if (tiles_ != nullptr && block.count >= kLeastTileRows) {
      const int64_t count = std::min(pairs, kInt8TaskStrips / kPairStrips);
      run_with_tiles(block, pair, count);
      return count;
    }
    run_pair(block, pair);
    return 1;
  }

  [[nodiscard]] Int8Strips strips_of(const RowBlock& block, int64_t pair) const {
    const int64_t first = pair * kPairStrips;
    return {.layout = layout_,
            .count = StripPair(shape_, block.expert, first).count(),
            .codes = weights_.codes(block.expert, first, 0),
            .scales = weights_.scales(block.expert, first, 0)};
  }

  void run_pair(const RowBlock& block, int64_t pair) const {
    alignas(64) std::array<std::array<Lanes, kPairStrips>, kBlockRows> sums;
    std::array<Int8Row, kBlockRows> rows;
    for (size_t i = 0; i < static_cast<size_t>(block.count); ++i) {
      rows[i] = {.data = data(call_.rows.source(block.rows[i])), .sums = sums[i][0].data()};
    }
    const Int8Strips strips = strips_of(block, pair);
    kernels_.multiply(strips, rows.data(), block.count);
    store_strips(shape_, call_, block, {pair * kPairStrips, strips.count},
                 side_by_side(sums.data()), kernels_.epilogue);
  }

  // The rows' codes and half scales for the tiles, as many columns as there is room for.
  struct PackedRows {
    alignas(64) std::array<uint8_t, kPackedCodes> codes;  // [cols / 32][rows][32]
    alignas(64) std::array<float, kPackedCodes / kInt8BlockCols> half_scales;  // [cols / 32][rows]
  };
  struct alignas(4096) DecodedStrip {
    std::array<uint8_t, kInt8ChunkCols * kStripRows> unused;  // The first half of the page.
    std::array<uint8_t, kInt8ChunkCols * kStripRows> weights;
    alignas(64) std::array<float, kInt8ChunkCols / kInt8BlockCols * kStripRows> factors;
  };

  void run_with_tiles(const RowBlock& block, int64_t first_pair, int64_t pairs) const {
    Int8TileChunk chunk;
    const int64_t groups = ceil_div(block.count, kInt8TileRows);
    chunk.group_rows = round_up(ceil_div(block.count, groups), kInt8TileStep);
    chunk.rows = groups * chunk.group_rows;
    alignas(64) std::array<std::array<Lanes, kInt8TaskStrips>, kBlockRows> sums;
    std::fill_n(sums.begin(), chunk.rows, std::array<Lanes, kInt8TaskStrips>{});
    PackedRows packed;
    DecodedStrip decoded;
    chunk.weights = decoded.weights.data();
    chunk.factors = decoded.factors.data();
    int64_t strips = 0;
    tiles_->configure(chunk.group_rows);
    const int64_t span = kPackedCodes / chunk.rows / kInt8ChunkCols * kInt8ChunkCols;
    for (int64_t begin = 0; begin < shape_.cols; begin += span) {
      const int64_t end = std::min(begin + span, shape_.cols);
      pack_rows(block, chunk.rows, begin, end, packed);
      strips = 0;
      for (int64_t pair = 0; pair < pairs; ++pair) {
        const Int8Strips of_pair = strips_of(block, first_pair + pair);
        for (int64_t first = begin; first < end; first += kInt8ChunkCols) {
          chunk.cols = std::min(kInt8ChunkCols, end - first);
          chunk.values = packed.codes.data() + (first - begin) * chunk.rows;
          chunk.half_scales =
              packed.half_scales.data() + (first - begin) / kInt8BlockCols * chunk.rows;
          for (int64_t i = 0; i < of_pair.count; ++i) {
            tiles_->decode(of_pair, i, first, chunk.cols, decoded.weights.data(),
                           decoded.factors.data());
            chunk.sums = sums[0][static_cast<size_t>(strips + i)].data();
            tiles_->multiply(chunk);
          }
        }
        strips += of_pair.count;
      }
    }
    tiles_->release();
    store_strips(shape_, call_, block, {first_pair * kPairStrips, strips},
                 side_by_side(sums.data()), kernels_.epilogue);
  }

  // Rows that are not there are zeros.
  void pack_rows(const RowBlock& block, int64_t rows, int64_t begin, int64_t end,
                 PackedRows& packed) const {
    for (int64_t i = 0; i < rows; ++i) {
      const bool is_there = i < block.count;
      const uint8_t* row =
          is_there ? data(call_.rows.source(block.rows[static_cast<size_t>(i)])) : nullptr;
      uint8_t* codes = packed.codes.data() + i * kInt8BlockCols;
      float* half_scale = packed.half_scales.data() + i;
      for (int64_t k = begin; k < end; k += kInt8BlockCols) {
        if (is_there) {
          std::memcpy(codes, row + k, kInt8BlockCols);
          std::memcpy(half_scale, row + layout_.half_scales + k / kInt8BlockCols * 4, 4);
        } else {
          std::memset(codes, 0, kInt8BlockCols);
          *half_scale = 0;
        }
        codes += rows * kInt8BlockCols;
        half_scale += rows;
      }
    }
  }

  const GemmShape shape_;
  const GemmCall& call_;
  const Int8Kernels& kernels_;
  const Int8TileKernels* tiles_;
  const StripWeights weights_;
  const InputRows<float> inputs_;
  const RowBlocks blocks_;
  const Int8RowLayout layout_;
};

}  // namespace

void run_int8_gemm(const GroupedGemmProblem& problem, const GemmCall& call,
                   const Int8Kernels& kernels, const Int8TileKernels* tiles) {
  Int8Gemm(problem, call, kernels, tiles).run();
}

}  // namespace narrowfloat
