// cpu_baseline, cpu_avx2, cpu_avx512, cpu_avx512_bf16, cpu_amx_bf16 and cpu_amx_int8: give the
// oracle's bytes on all cores. The baseline has portable 128-bit vectors; for fp32 sums the others
// have the kernels of their vector level (x86/gemm_kernels.h), and decode the E2M1 weights of few
// rows in registers.
//
// Fused multiply-adds stand for the two operations wherever products are exact (product_range.h).
// With Accumulation::kFast the levels have them always, still in ascending k, and those with BF16
// in their names have bf16 dot products (bf16_gemm.h). Rows in int8 have kernels of their own
// (int8_gemm.h).
//
// Activation rows are dequantized once into the workspace. An output tile is one packed strip of 16
// weight rows times up to 128 rows of one expert: the strip is decoded chunk by chunk of K into a
// buffer in the first-level cache, and every row is multiplied with the chunk. One token keeps all
// cores busy with strips, many tokens with row blocks; weights of experts without rows are never
// read. docs/kernels/cpu_grouped_gemm.md has the layouts and figures.
#include <array>
#include <atomic>
#include <type_traits>

#include "ops/grouped_gemm/bf16_gemm.h"
#include "ops/grouped_gemm/gemm_shape.h"
#include "ops/grouped_gemm/input_rows.h"
#include "ops/grouped_gemm/int8_gemm.h"
#include "ops/grouped_gemm/pack_weights.h"
#include "ops/grouped_gemm/product_range.h"
#include "ops/grouped_gemm/row_blocks.h"
#include "ops/grouped_gemm/strip_decoder.h"
#include "ops/grouped_gemm/strip_epilogue.h"
#include "ops/grouped_gemm/strip_kernel.h"
#include "ops/grouped_gemm/strip_loop.h"
#include "ops/grouped_gemm/strip_weights.h"
#include "ops/grouped_gemm/x86/gemm_kernels.h"
#include "runtime/vector_level.h"

namespace narrowfloat {
namespace {

static_assert(kLanes == kStripRows);

// AMD's cores add and multiply at the same time. With many rows, whose products wait for no result,
// a fused operation takes them as long as the two, or longer.
bool has_fast_fused_operations() {
#if defined(__x86_64__)
  static const bool kIsAmd = __builtin_cpu_is("amd") != 0;
  return !kIsAmd;
#else
  return true;
#endif
}

template <typename Real>
class BaselineGemm {
 public:
  // kernels: null for the portable loops.
  BaselineGemm(const GroupedGemmProblem& problem, const GemmCall& call, const GemmKernels* kernels)
      : shape_(problem),
        call_(call),
        kernels_(kernels),
        weights_(shape_, call.weights),
        inputs_(shape_, call.workspace + segment_bytes(problem)),
        blocks_(call.tiles, reinterpret_cast<Segment*>(call.workspace)) {}

  void run() {
    const bool is_fast = call_.accumulation == Accumulation::kFast;
    const bool are_exact = dequantize_rows();
    fuses_few_rows_ = is_fast || are_exact;
    fuses_rows_ = is_fast || (are_exact && has_fast_fused_operations());
    const int64_t strips = weights_.strips();
    const int64_t grain = std::max<int64_t>(1, kGrainProducts / (shape_.cols * kStripRows));
    for_each_strip(blocks_.count(), strips, grain, [&](int64_t block, int64_t strip, int64_t most) {
      return run_tiles(block, strip, most);
    });
  }

 private:
  using Lanes = typename StripDecoder<Real>::Lanes;
  static constexpr bool kHasKernels = std::is_same_v<Real, float>;
  // A chunk has 16 KiB; it consists of whole groups in every mode.
  static constexpr int64_t kChunkCols = 1024 / static_cast<int64_t>(sizeof(Real));
  static constexpr int64_t kLeastGroup = 16;

  // Computes the first of `strips` strips, or more of them. Returns how many.
  int64_t run_tiles(int64_t block_index, int64_t strip, int64_t strips) const {
    RowBlock block;
    blocks_.find(block_index, block);
    if (block.count == 0) return strips;
    if constexpr (kHasKernels) {
      if (has_kernels_for_few_rows() && block.count <= kFewRows) {
        const int64_t count = std::min(strips, kFewStrips);
        run_few_rows(block, strip, count);
        return count;
      }
    }
    run_tile(block, strip);
    return 1;
  }

  [[nodiscard]] bool has_kernels_for_few_rows() const {
    const GemmMode& mode = shape_.mode;
    return kernels_ != nullptr && shape_.weights.dtype == DType::kU8 && mode.group_cols == 0 &&
           mode.weight_scale == ScaleUse::kDecode && !mode.rounds_weights;
  }

  // Returns whether all products are known to be exact.
  [[nodiscard]] bool dequantize_rows() const {
    if constexpr (kHasKernels) {
      const bool has_range = call_.weight_encoding != 0 && call_.rows.dtype != DType::kF32;
      // Otherwise only the kernels for few rows gain, and experts have too many; rows of a
      // permutation count with their padding.
      const bool gains =
          has_fast_fused_operations() || call_.output_rows <= 2 * kFewRows * shape_.experts;
      const bool is_asked_for = kernels_ != nullptr && call_.accumulation != Accumulation::kFast;
      if (is_asked_for && has_range && gains) {
        const ExactFactors exact(MagnitudeRange::decoded(call_.weight_encoding));
        std::atomic<bool> are_exact = true;
        for_each_input_row<Real>(shape_, call_, inputs_, [&](int64_t row) {
          dequantize_row(shape_, call_.rows, row, inputs_);
          if (!exact.have_all(inputs_.values(row), shape_.cols)) are_exact = false;
        });
        return are_exact;
      }
    }
    dequantize_input_rows(shape_, call_, inputs_);
    return false;
  }

  [[nodiscard]] StripScale strip_scale() const {
    return shape_.weight_scales.type == ScaleType::kE4M3 ? StripScale::kE4M3 : StripScale::kUE8M0;
  }

  void run_few_rows(const RowBlock& block, int64_t first_strip, int64_t strips) const {
    alignas(64) std::array<std::array<Lanes, kFewStrips>, kFewRows> sums;
    FewRows task{.cols = shape_.cols,
                 .type = strip_scale(),
                 .block_cols = shape_.weight_scales.block_cols,
                 .strips = strips,
                 .rows = block.count,
                 .codes = {},
                 .scales = {},
                 .values = {},
                 .sums = {}};
    for (int64_t i = 0; i < strips; ++i) {
      task.codes[i] = weights_.codes(block.expert, first_strip + i, 0);
      task.scales[i] = weights_.scales(block.expert, first_strip + i, 0);
    }
    for (int64_t i = 0; i < block.count; ++i) {
      const auto index = static_cast<size_t>(i);
      task.values[i] = inputs_.values(call_.rows.source(block.rows[index]));
      task.sums[i] = sums[index][0].data();
    }
    (fuses_few_rows_ ? kernels_->fused_multiply_few_rows : kernels_->multiply_few_rows)(task);
    store_strips(shape_, call_, block, {first_strip, strips}, side_by_side(sums.data()),
                 kernels_->epilogue);
  }

  // Decodes a chunk with the kernels. Returns false where these do not have the mode's arithmetic.
  bool decode_with_kernels(int64_t expert, int64_t strip, int64_t first, int64_t count,
                           float* out) const {
    if (kernels_ == nullptr || shape_.mode.rounds_weights) return false;
    const uint8_t* codes = weights_.codes(expert, strip, first);
    const bool is_scaled = shape_.mode.weight_scale == ScaleUse::kDecode;
    if (shape_.weights.dtype == DType::kU8) {
      StripScales scales;
      if (is_scaled) {
        const int64_t block_cols = shape_.weight_scales.block_cols;
        scales = {strip_scale(), block_cols, weights_.scales(expert, strip, first / block_cols)};
      }
      kernels_->decode_e2m1(codes, count, scales, out);
    } else if (shape_.weights.dtype == DType::kF8E4M3 && !is_scaled) {
      kernels_->decode_e4m3(codes, count, out);
    } else if (shape_.weights.dtype == DType::kBF16) {
      kernels_->decode_bf16(codes, count, out);
    } else {
      return false;
    }
    return true;
  }

  void run_tile(const RowBlock& block, int64_t strip) const {
    alignas(64) std::array<Lanes, kBlockRows> sums;
    std::fill_n(sums.begin(), block.count, Lanes{});
    const StripDecoder<Real> decoder(shape_, weights_, block.expert, strip);
    for (int64_t first = 0; first < shape_.cols; first += kChunkCols) {
      add_chunk(decoder, block, strip, first, sums.data());
    }
    store_strips(shape_, call_, block, {strip, 1},
                 BlockSums<Real>{.first = sums[0].data(), .row = kStripRows, .strip = 0},
                 kernels_ == nullptr ? nullptr : kernels_->epilogue);
  }

  void add_chunk(const StripDecoder<Real>& decoder, const RowBlock& block, int64_t strip,
                 int64_t first, Lanes* sums) const {
    const bool is_grouped = shape_.mode.row_scale == ScaleUse::kGroup;
    alignas(64) std::array<Real, kChunkCols * kStripRows> weights;
    alignas(64) std::array<Lanes, kChunkCols / kLeastGroup> factors;
    const int64_t count = std::min(kChunkCols, shape_.cols - first);
    bool is_decoded = false;
    if constexpr (kHasKernels) {
      is_decoded = decode_with_kernels(block.expert, strip, first, count, weights.data());
    }
    if (!is_decoded) decoder.decode(first, count, weights.data());
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
    const WeightChunk<Real> chunk{.weights = weights.data(),
                                  .cols = count,
                                  .group_cols = is_grouped ? shape_.group_cols : 0,
                                  .factors = factors[0].data()};
    if constexpr (kHasKernels) {
      if (kernels_ != nullptr) {
        const auto multiply = fuses_rows_ ? kernels_->fused_multiply : kernels_->multiply;
        return multiply(chunk, operands.data(), block.count);
      }
    }
    multiply_chunk<Real>(chunk, operands.data(), block.count);
  }

  const GemmShape shape_;
  const GemmCall& call_;
  const GemmKernels* kernels_;
  const StripWeights weights_;
  const InputRows<Real> inputs_;
  const RowBlocks blocks_;
  bool fuses_few_rows_ = false;
  bool fuses_rows_ = false;
};

void run_with(const GemmKernels* kernels, const GroupedGemmProblem& problem, const GemmCall& call) {
  if (call.accumulation == Accumulation::kFp64) {
    return BaselineGemm<double>(problem, call, kernels).run();
  }
  BaselineGemm<float>(problem, call, kernels).run();
}

void run(const GroupedGemmProblem& problem, const GemmCall& call, Stream /*stream*/) {
  run_with(nullptr, problem, call);
}

int64_t workspace_bytes(const GroupedGemmProblem& problem, int64_t a_rows,
                        Accumulation accumulation) {
  const GemmShape shape(problem);
  const int64_t row = accumulation == Accumulation::kFp64 ? InputRows<double>::row_bytes(shape)
                                                          : InputRows<float>::row_bytes(shape);
  return segment_bytes(problem) + round_up(a_rows * row, kGemmAlignment);
}

Support supports(const GroupedGemmProblem& problem) { return cpu_only(problem.device); }

#if defined(NARROWFLOAT_VECTOR_LEVELS)

template <VectorLevel kLevel>
Support supports_level(const GroupedGemmProblem& problem) {
  return cpu_with(problem.device, kLevel);
}

// Other modes have no products of bytes, or blocks too short for tiles.
Support supports_int8_tiles(const GroupedGemmProblem& problem) {
  Support support = cpu_with(problem.device, VectorLevel::kAmxInt8);
  if (!support.ok() || problem.mode == MoeMode::kMxfp4Int8) return support;
  return Support::no("multiplies MXFP4 weights by rows in int8 alone");
}

template <VectorLevel kLevel>
void run_level(const GroupedGemmProblem& problem, const GemmCall& call, Stream /*stream*/) {
  if (gemm_mode(problem.mode).has_int8_rows && call.accumulation != Accumulation::kFp64) {
    const bool is_avx2 = kLevel == VectorLevel::kAvx2;
    const bool has_tiles = kLevel >= VectorLevel::kAmxInt8 && take_tiles();
    return run_int8_gemm(problem, call, is_avx2 ? kInt8KernelsAvx2 : kInt8KernelsAvx512,
                         has_tiles ? &kInt8TileKernelsAmx : nullptr);
  }
  if (kLevel >= VectorLevel::kAvx512Bf16 && call.accumulation == Accumulation::kFast) {
    static const TileGemmKernels kTiles{kTileKernelsAmx, kTileOrderKernelsAvx512};
    const bool has_tiles = kLevel >= VectorLevel::kAmxBf16 && take_tiles();
    return run_bf16_gemm(problem, call, kBf16KernelsAvx512, has_tiles ? &kTiles : nullptr);
  }
  run_with(kLevel == VectorLevel::kAvx2 ? &kGemmKernelsAvx2 : &kGemmKernelsAvx512, problem, call);
}

#endif

}  // namespace

const GroupedGemmImpl kGroupedGemmCpuBaseline{"cpu_baseline",      supports,
                                              pack_weight_strips,  workspace_bytes,
                                              supports_any_tiles,  no_fused_activation,
                                              no_dequantized_rows, run};
#if defined(NARROWFLOAT_VECTOR_LEVELS)
const GroupedGemmImpl kGroupedGemmCpuAvx2{"cpu_avx2",          supports_level<VectorLevel::kAvx2>,
                                          pack_weight_strips,  workspace_bytes,
                                          supports_any_tiles,  no_fused_activation,
                                          no_dequantized_rows, run_level<VectorLevel::kAvx2>};
const GroupedGemmImpl kGroupedGemmCpuAvx512{
    "cpu_avx512",        supports_level<VectorLevel::kAvx512>,
    pack_weight_strips,  workspace_bytes,
    supports_any_tiles,  no_fused_activation,
    no_dequantized_rows, run_level<VectorLevel::kAvx512>};
const GroupedGemmImpl kGroupedGemmCpuAvx512Bf16{
    "cpu_avx512_bf16",   supports_level<VectorLevel::kAvx512Bf16>,
    pack_weight_strips,  workspace_bytes,
    supports_any_tiles,  no_fused_activation,
    no_dequantized_rows, run_level<VectorLevel::kAvx512Bf16>};
const GroupedGemmImpl kGroupedGemmCpuAmxBf16{
    "cpu_amx_bf16",      supports_level<VectorLevel::kAmxBf16>,
    pack_weight_strips,  workspace_bytes,
    supports_any_tiles,  no_fused_activation,
    no_dequantized_rows, run_level<VectorLevel::kAmxBf16>};
const GroupedGemmImpl kGroupedGemmCpuAmxInt8{
    "cpu_amx_int8",     supports_int8_tiles, pack_weight_strips,  workspace_bytes,
    supports_any_tiles, no_fused_activation, no_dequantized_rows, run_level<VectorLevel::kAmxInt8>};
#endif

}  // namespace narrowfloat
