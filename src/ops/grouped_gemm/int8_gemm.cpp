// See int8_gemm.h.
//
// Rows in int8 stand in the workspace in the place of fp32 ones, closer together.
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

using Epilogue = StripEpilogue<float>;
using Lanes = Epilogue::Lanes;

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
  Int8Gemm(const GroupedGemmProblem& problem, const GemmCall& call, const Int8Kernels& kernels)
      : shape_(problem),
        call_(call),
        kernels_(kernels),
        weights_(shape_, call.weights),
        inputs_(shape_, call.workspace + segment_bytes(problem), row_stride(shape_)),
        blocks_(call.tiles, reinterpret_cast<Segment*>(call.workspace)),
        layout_(layout_of(shape_)) {}

  void run() const {
    for_each_input_row<float>(shape_, call_, inputs_, [&](int64_t row) { round(row); });
    const int64_t pairs = ceil_div(weights_.strips(), kPairStrips);
    const int64_t products = shape_.cols * kStripRows * kPairStrips;
    const int64_t grain = std::max<int64_t>(1, kGrainProducts / products);
    const auto run = [&](int64_t block, int64_t pair, int64_t /*most*/) {
      run_pair(block, pair);
      return int64_t{1};
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

  void run_pair(int64_t block_index, int64_t pair) const {
    RowBlock block;
    blocks_.find(block_index, block);
    if (block.count == 0) return;
    alignas(64) std::array<std::array<Lanes, kPairStrips>, kBlockRows> sums;
    std::array<Int8Row, kBlockRows> rows;
    for (size_t i = 0; i < static_cast<size_t>(block.count); ++i) {
      rows[i] = {.data = data(call_.rows.source(block.rows[i])), .sums = sums[i][0].data()};
    }
    const int64_t first = pair * kPairStrips;
    const int64_t count = StripPair(shape_, first).count();
    kernels_.multiply({.layout = layout_,
                       .count = count,
                       .codes = weights_.codes(block.expert, first, 0),
                       .scales = weights_.scales(block.expert, first, 0)},
                      rows.data(), block.count);
    for (int64_t strip = 0; strip < count; ++strip) {
      const Epilogue epilogue(shape_, call_, block.expert, first + strip);
      for (size_t i = 0; i < static_cast<size_t>(block.count); ++i) {
        epilogue.store(block.rows[i], sums[i][static_cast<size_t>(strip)]);
      }
    }
  }

  const GemmShape shape_;
  const GemmCall& call_;
  const Int8Kernels& kernels_;
  const StripWeights weights_;
  const InputRows<float> inputs_;
  const RowBlocks blocks_;
  const Int8RowLayout layout_;
};

}  // namespace

void run_int8_gemm(const GroupedGemmProblem& problem, const GemmCall& call,
                   const Int8Kernels& kernels) {
  Int8Gemm(problem, call, kernels).run();
}

}  // namespace narrowfloat
