// cpu_baseline: gives the oracle's bytes on all cores, in portable 128-bit vectors.
//
// Activation rows are dequantized once into the workspace. An output tile is one packed strip of 16
// weight rows times up to 128 rows of one expert: the strip is decoded chunk by chunk of K into a
// buffer in the first-level cache, and every row is multiplied with the chunk. One token keeps all
// cores busy with strips, many tokens with row blocks; weights of experts without rows are never
// read. docs/kernels/cpu_grouped_gemm.md has the layouts and figures.
#include <array>

#include "ops/grouped_gemm/gemm_output.h"
#include "ops/grouped_gemm/gemm_shape.h"
#include "ops/grouped_gemm/input_rows.h"
#include "ops/grouped_gemm/pack_weights.h"
#include "ops/grouped_gemm/strip_decoder.h"
#include "ops/grouped_gemm/strip_kernel.h"
#include "ops/grouped_gemm/strip_weights.h"
#include "runtime/parallel.h"

namespace narrowfloat {
namespace {

static_assert(kLanes == kStripRows);

constexpr int64_t kBlockRows = 128;
// Tasks of fewer multiply-adds are not split further.
constexpr int64_t kGrainProducts = 32768;

// Consecutive m tiles of one expert, and the number of row blocks before them.
struct Segment {
  int64_t first_block;
  int32_t expert;
  int32_t first_tile;
  int32_t end_tile;
};

int64_t segment_bytes(const GroupedGemmProblem& problem) {
  return round_up(problem.experts * static_cast<int64_t>(sizeof(Segment)), kGemmAlignment);
}

struct Segments {
  const Segment* list = nullptr;
  int64_t count = 0;
  int64_t blocks = 0;

  // The segment of a row block.
  [[nodiscard]] const Segment& of(int64_t block) const {
    const Segment* next =
        std::upper_bound(list, list + count, block,
                         [](int64_t b, const Segment& segment) { return b < segment.first_block; });
    return *(next - 1);
  }
};

// Experts ascend, so there are at most as many segments as experts.
Segments find_segments(const GemmTiles& tiles, Segment* list) {
  Segments segments{.list = list};
  for (int64_t tile = 0; tile < tiles.count;) {
    int64_t end = tile + 1;
    while (end < tiles.count && tiles.experts[end] == tiles.experts[tile]) ++end;
    list[segments.count++] = {.first_block = segments.blocks,
                              .expert = tiles.experts[tile],
                              .first_tile = static_cast<int32_t>(tile),
                              .end_tile = static_cast<int32_t>(end)};
    segments.blocks += ceil_div((end - tile) * tiles.token_tile, kBlockRows);
    tile = end;
  }
  return segments;
}

template <typename Real>
class BaselineGemm {
 public:
  BaselineGemm(const GroupedGemmProblem& problem, const GemmCall& call)
      : shape_(problem),
        call_(call),
        weights_(shape_, call.weights),
        inputs_(shape_, call.workspace + segment_bytes(problem)),
        segments_(find_segments(call.tiles, reinterpret_cast<Segment*>(call.workspace))) {}

  void run() const {
    dequantize_input_rows(shape_, call_, inputs_);
    const int64_t strips = weights_.strips();
    const int64_t grain = std::max<int64_t>(1, kGrainProducts / (shape_.cols * kStripRows));
    parallel_for(segments_.blocks * strips, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) run_tile(i / strips, i % strips);
    });
  }

 private:
  using Lanes = typename StripDecoder<Real>::Lanes;
  // A chunk has 16 KiB; it consists of whole groups in every mode.
  static constexpr int64_t kChunkCols = 1024 / static_cast<int64_t>(sizeof(Real));
  static constexpr int64_t kLeastGroup = 32;

  // The valid rows of a row block.
  struct Block {
    int64_t expert;
    int64_t count = 0;
    std::array<int64_t, kBlockRows> rows;
  };

  void find_rows(int64_t index, Block& block) const {
    const GemmTiles& tiles = call_.tiles;
    const Segment& segment = segments_.of(index);
    const int64_t begin =
        segment.first_tile * tiles.token_tile + (index - segment.first_block) * kBlockRows;
    const int64_t end = std::min(begin + kBlockRows, segment.end_tile * tiles.token_tile);
    block.expert = segment.expert;
    for (int64_t row = begin; row < end; ++row) {
      if (row < tiles.row_ends[row / tiles.token_tile]) {
        block.rows[static_cast<size_t>(block.count++)] = row;
      }
    }
  }

  void run_tile(int64_t block_index, int64_t strip) const {
    Block block;
    find_rows(block_index, block);
    if (block.count == 0) return;
    alignas(64) std::array<Lanes, kBlockRows> sums;
    std::fill_n(sums.begin(), block.count, Lanes{});
    const StripDecoder<Real> decoder(shape_, weights_, block.expert, strip);
    for (int64_t first = 0; first < shape_.cols; first += kChunkCols) {
      add_chunk(decoder, block, first, sums.data());
    }
    const Epilogue epilogue(*this, block.expert, strip);
    for (int64_t i = 0; i < block.count; ++i) {
      epilogue.store(block.rows[static_cast<size_t>(i)], sums[static_cast<size_t>(i)]);
    }
  }

  void add_chunk(const StripDecoder<Real>& decoder, const Block& block, int64_t first,
                 Lanes* sums) const {
    const bool is_grouped = shape_.mode.row_scale == ScaleUse::kGroup;
    alignas(64) std::array<Real, kChunkCols * kStripRows> weights;
    alignas(64) std::array<Lanes, kChunkCols / kLeastGroup> factors;
    const int64_t count = std::min(kChunkCols, shape_.cols - first);
    decoder.decode(first, count, weights.data());
    const int64_t first_group = is_grouped ? first / shape_.group_cols : 0;
    const int64_t groups = is_grouped ? ceil_div(count, shape_.group_cols) : 0;
    for (int64_t group = 0; group < groups; ++group) {
      decoder.factors(first_group + group, factors[static_cast<size_t>(group)]);
    }
    std::array<RowOperand<Real>, kBlockRows> operands;
    for (int64_t i = 0; i < block.count; ++i) {
      const int64_t row = call_.rows.source(block.rows[static_cast<size_t>(i)]);
      operands[static_cast<size_t>(i)] = {.values = inputs_.values(row) + first,
                                          .factors = inputs_.factors(row) + first_group,
                                          .sums = sums[i].data()};
    }
    multiply_chunk<Real>({.weights = weights.data(),
                          .cols = count,
                          .group_cols = is_grouped ? shape_.group_cols : 0,
                          .factors = factors[0].data()},
                         operands.data(), block.count);
  }

  // Applies factors and bias of a strip's output columns. Absent ones are the neutral elements of
  // their operation, which for an addition is -0.
  class Epilogue {
   public:
    Epilogue(const BaselineGemm& gemm, int64_t expert, int64_t strip)
        : call_(gemm.call_), rows_(gemm.shape_.rows), first_(strip * kStripRows) {
      const GemmEpilogue& epilogue = call_.epilogue;
      for (int64_t lane = 0; lane < kStripRows; ++lane) {
        const int64_t n = first_ + lane;
        const bool is_gate = epilogue.gate_order && is_gate_row(*epilogue.gate_order, n, rows_);
        scales_[static_cast<size_t>(lane)] =
            is_gate ? epilogue.gate_scale.of(expert) : epilogue.scale.of(expert);
        bias_[static_cast<size_t>(lane)] = bias(expert * rows_ + n);
      }
    }

    void store(int64_t row, const Lanes& sums) const {
      const GemmEpilogue& epilogue = call_.epilogue;
      Real weight = 1;
      if (epilogue.slot_weights != nullptr) {
        weight = epilogue.slot_weights[epilogue.row_to_slot[row]];
      }
      Real row_scale = 1;
      if (call_.rows.row_scale != nullptr) {
        row_scale = call_.rows.row_scale[call_.rows.source(row)];
      }
      for (size_t lane = 0; lane < sums.size(); ++lane) {
        const Real value = (scales_[lane] * row_scale) * (weight * sums[lane]) + bias_[lane];
        store_result(call_.output_dtype, value, row * rows_ + first_ + static_cast<int64_t>(lane),
                     call_.output);
      }
    }

   private:
    [[nodiscard]] float bias(int64_t index) const {
      const GemmEpilogue& epilogue = call_.epilogue;
      if (epilogue.bias == nullptr) return -0.0F;
      if (epilogue.bias_dtype == DType::kF32) {
        return static_cast<const float*>(epilogue.bias)[index];
      }
      return bf16_to_float(static_cast<const uint16_t*>(epilogue.bias)[index]);
    }

    const GemmCall& call_;
    int64_t rows_;
    int64_t first_;
    Lanes scales_;
    Lanes bias_;
  };

  const GemmShape shape_;
  const GemmCall& call_;
  const StripWeights weights_;
  const InputRows<Real> inputs_;
  const Segments segments_;
};

void run(const GroupedGemmProblem& problem, const GemmCall& call, Stream /*stream*/) {
  if (call.accumulation == Accumulation::kFp64) return BaselineGemm<double>(problem, call).run();
  BaselineGemm<float>(problem, call).run();
}

int64_t workspace_bytes(const GroupedGemmProblem& problem, int64_t a_rows,
                        Accumulation accumulation) {
  const GemmShape shape(problem);
  const int64_t row = accumulation == Accumulation::kFp64 ? InputRows<double>::row_bytes(shape)
                                                          : InputRows<float>::row_bytes(shape);
  return segment_bytes(problem) + round_up(a_rows * row, kGemmAlignment);
}

Support supports(const GroupedGemmProblem& problem) { return cpu_only(problem.device); }

}  // namespace

const GroupedGemmImpl kGroupedGemmCpuBaseline{"cpu_baseline",      supports,
                                              pack_weight_strips,  workspace_bytes,
                                              supports_any_tiles,  no_fused_activation,
                                              no_dequantized_rows, run};

}  // namespace narrowfloat
