// cpu_reference: the oracle. Plain loops over rows and blocks, one thread; docs/formats/ has the
// formulas, src/formats/ their only implementation. Golden vectors of an independent model
// (tests/golden) judge it, not other implementations.
#include <algorithm>
#include <array>

#include "ops/quantize/block_encoder.h"
#include "ops/quantize/encode_scales.h"
#include "ops/quantize/quantize_impls.h"
#include "ops/quantize/quantize_output.h"
#include "ops/quantize/row_source.h"
#include "runtime/float_environment.h"
#include "tensor/grouped_rows.h"

namespace narrowfloat {
namespace {

constexpr int64_t kMaxBlock = 128;

template <BlockFormat Format, class Math>
class ReferenceQuantizer {
 public:
  using Stored = typename Format::Stored;

  ReferenceQuantizer(const QuantizeProblem& problem, const QuantizeArgs& args,
                     const RowSource& source, const EncodeScales& scales)
      : problem_(problem), args_(args), source_(source), scales_(scales), encoder_(problem) {}

  void quantize_batch(int64_t batch) const {
    const int64_t rows = valid_rows(problem_, args_, batch);
    if constexpr (Format::kId == FormatId::kFp8Tensor) {
      quantize_tile(batch, 0, rows, tensor_scale(batch));
    } else if constexpr (Format::kBlockRows > 1) {
      for (int64_t row = 0; row < rows; row += Format::kBlockRows)
        quantize_row_of_tiles(batch, row);
    } else if (problem_.has_row_list) {
      for (const int32_t row : args_.row_list) {
        if (row >= 0 && row < problem_.rows) quantize_row(batch, row);
      }
    } else {
      for (int64_t row = 0; row < rows; ++row) quantize_row(batch, row);
    }
  }

 private:
  [[nodiscard]] int64_t flat(int64_t batch, int64_t row) const {
    return batch * problem_.rows + row;
  }

  // Quantizes a row of a format with blocks inside a row.
  void quantize_row(int64_t batch, int64_t row) const {
    const float factor = source_.row_factor(flat(batch, row), scales_.encode(batch, row));
    const RowScaling scaling = row_scaling(batch, row, factor);
    std::array<float, kMaxBlock> x;
    std::array<uint8_t, kMaxBlock> codes;
    for (int64_t col = 0; col < problem_.cols; col += Format::kBlockCols) {
      const int64_t count = std::min(Format::kBlockCols, problem_.cols - col);
      source_.load(flat(batch, row), factor, col, count, x.data());
      const Stored stored = encoder_.encode(x.data(), count, scaling, codes.data());
      store(batch, row, col / Format::kBlockCols, stored);
      store_codes<typename Format::Element>(args_, flat(batch, row), col, codes.data(), count);
    }
    clear_value_padding(problem_, args_, flat(batch, row));
  }

  [[nodiscard]] RowScaling row_scaling(int64_t batch, int64_t row, float factor) const {
    if constexpr (Format::kHasRowScale) {
      AbsMax amax;
      add_row(batch, row, factor, amax);
      const auto scale = Format::template row_scale<Math>(amax.or_zero(), args_.base_decode_scale);
      args_.global_scale[flat(batch, row)] = canonical_nan(scale.stored);
      return {scale.pair, amax.or_zero()};
    } else if constexpr (Format::kHasGlobalScale) {
      return {Format::template scale_pair<Math>(scales_.encode(batch, row)), 0.0F};
    }
    return {{scales_.encode(batch, row), 1.0F}, 0.0F};
  }

  void add_row(int64_t batch, int64_t row, float factor, AbsMax& amax) const {
    std::array<float, kMaxBlock> x;
    for (int64_t col = 0; col < problem_.cols; col += kMaxBlock) {
      const int64_t count = std::min(kMaxBlock, problem_.cols - col);
      source_.load(flat(batch, row), factor, col, count, x.data());
      amax.add(x.data(), count);
    }
  }

  // Quantizes one row of 128x128 tiles.
  void quantize_row_of_tiles(int64_t batch, int64_t first_row) const {
    const int64_t rows = std::min(Format::kBlockRows, problem_.rows - first_row);
    std::array<float, kMaxBlock> factors;
    for (int64_t i = 0; i < rows; ++i) {
      factors[static_cast<size_t>(i)] = source_.row_factor(flat(batch, first_row + i), 1.0F);
    }
    std::array<float, kMaxBlock> x;
    for (int64_t col = 0; col < problem_.cols; col += Format::kBlockCols) {
      const int64_t count = std::min(Format::kBlockCols, problem_.cols - col);
      AbsMax amax;
      for (int64_t i = 0; i < rows; ++i) {
        source_.load(flat(batch, first_row + i), factors[static_cast<size_t>(i)], col, count,
                     x.data());
        amax.add(x.data(), count);
      }
      const auto scale = encoder_.block_scale(amax.or_zero(), ScalePair{});
      store(batch, first_row / Format::kBlockRows, col / Format::kBlockCols, scale.stored);
      for (int64_t i = 0; i < rows; ++i) {
        encode_run(batch, first_row + i, factors[static_cast<size_t>(i)], col, scale.multiplier);
      }
    }
  }

  // The scale of a whole tensor.
  [[nodiscard]] BlockScale<float> tensor_scale(int64_t batch) const {
    if (args_.fp8_decode_scale) return Fp8Tensor::given_scale(*args_.fp8_decode_scale);
    AbsMax amax;
    for (int64_t row = 0; row < valid_rows(problem_, args_, batch); ++row) {
      add_row(batch, row, source_.row_factor(flat(batch, row), 1.0F), amax);
    }
    return Fp8Tensor::block_scale<Math>(amax.or_zero(), ScalePair{}, problem_.rules);
  }

  void quantize_tile(int64_t batch, int64_t first_row, int64_t rows,
                     const BlockScale<float>& scale) const {
    store(batch, 0, 0, scale.stored);
    for (int64_t row = first_row; row < first_row + rows; ++row) {
      const float factor = source_.row_factor(flat(batch, row), 1.0F);
      for (int64_t col = 0; col < problem_.cols; col += kMaxBlock) {
        encode_run(batch, row, factor, col, scale.multiplier);
      }
    }
  }

  // Encodes up to 128 columns with a known multiplier.
  void encode_run(int64_t batch, int64_t row, float factor, int64_t col, float multiplier) const {
    std::array<float, kMaxBlock> x;
    std::array<uint8_t, kMaxBlock> codes;
    const int64_t count = std::min(kMaxBlock, problem_.cols - col);
    source_.load(flat(batch, row), factor, col, count, x.data());
    encode_values<Format, Math>(x.data(), count, multiplier, codes.data());
    store_codes<typename Format::Element>(args_, flat(batch, row), col, codes.data(), count);
  }

  void store(int64_t batch, int64_t row, int64_t block, Stored stored) const {
    stored = canonical_scale(stored);
    const std::span<const Stored> one(&stored, 1);
    const int64_t packed_row = scale_row(args_.row_offsets, row);
    store_scales<Stored>(args_.scales, batch, packed_row, block, one);
    store_scales<Stored>(args_.extra_scales, batch, packed_row, block, one);
  }

  const QuantizeProblem& problem_;
  const QuantizeArgs& args_;
  const RowSource& source_;
  const EncodeScales& scales_;
  BlockEncoder<Format, Math> encoder_;
};

float batch_amax(const QuantizeProblem& problem, const QuantizeArgs& args, const RowSource& source,
                 int64_t batch) {
  AbsMax amax;
  std::array<float, kMaxBlock> x;
  for (int64_t i = 0; i < valid_rows(problem, args, batch); ++i) {
    const int64_t row = batch * problem.rows + i;
    const float factor = source.row_factor(row, 1.0F);
    for (int64_t col = 0; col < problem.cols; col += kMaxBlock) {
      const int64_t count = std::min(kMaxBlock, problem.cols - col);
      source.load_unscaled(row, factor, col, count, x.data());
      amax.add(x.data(), count);
    }
  }
  return amax.or_zero();
}

void run(const QuantizeProblem& problem, const QuantizeArgs& args, Stream /*stream*/) {
  const FloatEnvironmentGuard guard;
  const RowSource source(problem, args);
  for (int64_t row = 0; row < problem.batch * problem.rows; ++row) {
    if (problem.source == RowSourceKind::kAddRmsNorm) source.add_residual(row);
    if (args.norm_output != nullptr) source.store_norm(row);
  }
  clear_scales(args.scales);
  clear_scales(args.extra_scales);
  const EncodeScales scales(problem, args, [&](int64_t first_batch, int64_t batches) {
    float amax = 0.0F;
    for (int64_t batch = first_batch; batch < first_batch + batches; ++batch) {
      amax = std::max(amax, batch_amax(problem, args, source, batch));
    }
    return amax;
  });
  scales.store_decode_scales();
  clear_row_scales(problem, args);
  visit_format_and_math(problem, [&]<BlockFormat Format, class Math>() {
    const ReferenceQuantizer<Format, Math> oracle(problem, args, source, scales);
    for (int64_t batch = 0; batch < problem.batch; ++batch) oracle.quantize_batch(batch);
  });
}

Support supports(const QuantizeProblem& problem) { return cpu_only(problem.device); }

}  // namespace

const QuantizeImpl kQuantizeCpuReference{"cpu_reference", supports, run};

}  // namespace narrowfloat
