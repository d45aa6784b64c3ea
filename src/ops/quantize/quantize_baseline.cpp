// cpu_baseline: all cores through oneTBB, portable C++ that compilers vectorise, the oracle's
// bytes.
//
// Work is cut into segments of one row (up to 2048 columns), bands of 128 rows for 128x128 blocks,
// or whole rows where a row needs a statistic first. A segment is widened to fp32 once into a stack
// buffer; maxima, codes and packing then are loops with constant trip counts over that buffer. No
// buffer is larger than one 128x128 tile.
#include <algorithm>
#include <array>
#include <functional>
#include <vector>

#include "ops/quantize/block_encoder.h"
#include "ops/quantize/encode_scales.h"
#include "ops/quantize/quantize_impls.h"
#include "ops/quantize/quantize_output.h"
#include "ops/quantize/row_source.h"
#include "runtime/float_environment.h"
#include "runtime/parallel.h"
#include "tensor/grouped_rows.h"

namespace narrowfloat {
namespace {

constexpr int64_t kSegment = 2048;
constexpr int64_t kTile = 128;
// Elements below which a piece of work is not split further.
constexpr int64_t kGrainElements = 16384;

template <BlockFormat Format, class Math>
class Baseline {
 public:
  using Stored = typename Format::Stored;
  using Element = typename Format::Element;

  Baseline(const QuantizeProblem& problem, const QuantizeArgs& args, const RowSource& source,
           const EncodeScales& scales)
      : problem_(problem), args_(args), source_(source), scales_(scales), encoder_(problem) {
    const bool needs_whole_rows = Format::kHasRowScale ||
                                  problem.source == RowSourceKind::kRmsNorm ||
                                  problem.source == RowSourceKind::kAddRmsNorm;
    segment_ = needs_whole_rows ? std::max<int64_t>(problem.cols, 1) : kSegment;
  }

  void quantize_batch(int64_t batch, const std::function<float(int64_t)>& amax) const {
    const int64_t rows = valid_rows(problem_, args_, batch);
    if constexpr (Format::kId == FormatId::kFp8Tensor) {
      const BlockScale<float> scale =
          args_.fp8_decode_scale
              ? Fp8Tensor::given_scale(*args_.fp8_decode_scale)
              : Fp8Tensor::block_scale<Math>(amax(batch), ScalePair{}, problem_.rules);
      store(batch, 0, 0, std::span(&scale.stored, 1));
      for_segments(rows, [&](int64_t row, int64_t col, int64_t count) {
        const int64_t flat_row = flat(batch, row);
        encode_run(flat_row, source_.row_factor(flat_row, 1.0F), col, count, scale.multiplier);
      });
    } else if constexpr (Format::kBlockRows > 1) {
      parallel_for(ceil_div(rows, kTile), 1, [&](int64_t begin, int64_t end) {
        for (int64_t band = begin; band < end; ++band) quantize_band(batch, band);
      });
    } else if (problem_.has_row_list) {
      quantize_listed_rows(batch);
    } else {
      for_segments(rows, [&](int64_t row, int64_t col, int64_t count) {
        quantize_segment(batch, row, col, count);
      });
      clear_padding(batch, rows);
    }
  }

 private:
  [[nodiscard]] int64_t flat(int64_t batch, int64_t row) const {
    return batch * problem_.rows + row;
  }

  // Calls body(row, col, count) for every segment of `rows` rows; at least once a row, so that an
  // empty row gets its statistics.
  template <typename Body>
  void for_segments(int64_t rows, const Body& body) const {
    const int64_t per_row = std::max<int64_t>(1, ceil_div(problem_.cols, segment_));
    const int64_t grain = std::max<int64_t>(
        1, kGrainElements / std::max<int64_t>(1, std::min(segment_, problem_.cols)));
    parallel_for(rows * per_row, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t col = i % per_row * segment_;
        body(i / per_row, col, std::min(segment_, problem_.cols - col));
      }
    });
  }

  // A row that is listed twice is worked on once.
  void quantize_listed_rows(int64_t batch) const {
    std::vector<uint8_t> is_listed(static_cast<size_t>(problem_.rows), 0);
    for (const int32_t row : args_.row_list) {
      if (row >= 0 && row < problem_.rows) is_listed[static_cast<size_t>(row)] = 1;
    }
    for_segments(problem_.rows, [&](int64_t row, int64_t col, int64_t count) {
      if (is_listed[static_cast<size_t>(row)] != 0) quantize_segment(batch, row, col, count);
    });
  }

  void clear_padding(int64_t batch, int64_t rows) const {
    if (problem_.value_cols == problem_.cols) return;
    for (int64_t row = 0; row < rows; ++row) clear_value_padding(problem_, args_, flat(batch, row));
  }

  void quantize_segment(int64_t batch, int64_t row, int64_t first_col, int64_t count) const {
    const int64_t flat_row = flat(batch, row);
    const float factor = source_.row_factor(flat_row, scales_.encode(batch, row));
    const RowScaling scaling = row_scaling(batch, row, factor);
    std::array<float, kSegment> x;
    for (int64_t done = 0; done < count; done += kSegment) {
      const int64_t n = std::min(kSegment, count - done);
      source_.load(flat_row, factor, first_col + done, n, x.data());
      encode_blocks(batch, row, first_col + done, std::span(x).first(static_cast<size_t>(n)),
                    scaling);
    }
  }

  [[nodiscard]] RowScaling row_scaling(int64_t batch, int64_t row, float factor) const {
    if constexpr (Format::kHasRowScale) {
      const float amax = bits_float(row_amax_bits(flat(batch, row), factor));
      const auto scale = Format::template row_scale<Math>(amax, args_.base_decode_scale);
      args_.global_scale[flat(batch, row)] = canonical_nan(scale.stored);
      return {scale.pair, amax};
    } else if constexpr (Format::kHasGlobalScale) {
      return {Format::template scale_pair<Math>(scales_.encode(batch, row)), 0.0F};
    }
    return {{scales_.encode(batch, row), 1.0F}, 0.0F};
  }

  [[nodiscard]] uint32_t row_amax_bits(int64_t flat_row, float factor) const {
    AbsMax amax;
    std::array<float, kTile> x;
    for (int64_t col = 0; col < problem_.cols; col += kTile) {
      const int64_t n = std::min(kTile, problem_.cols - col);
      source_.load(flat_row, factor, col, n, x.data());
      amax.add(x.data(), n);
    }
    return float_bits(amax.or_zero());
  }

  void encode_blocks(int64_t batch, int64_t row, int64_t first_col, std::span<const float> x,
                     const RowScaling& scaling) const {
    constexpr int64_t kCols = Format::kBlockCols;
    std::array<uint8_t, kSegment> codes;
    std::array<Stored, kSegment / kCols> stored;
    const auto count = static_cast<int64_t>(x.size());
    const int64_t blocks = ceil_div(count, kCols);
    const int64_t full = encoder_.is_plain() ? count / kCols : 0;
    for (int64_t i = 0; i < full; ++i) {
      stored[static_cast<size_t>(i)] =
          encode_full_block(x.data() + i * kCols, scaling, codes.data() + i * kCols);
    }
    for (int64_t i = full; i < blocks; ++i) {
      const int64_t n = std::min(kCols, count - i * kCols);
      stored[static_cast<size_t>(i)] =
          encoder_.encode(x.data() + i * kCols, n, scaling, codes.data() + i * kCols);
    }
    if constexpr (std::is_same_v<Stored, float>) {
      for (int64_t i = 0; i < blocks; ++i) {
        stored[static_cast<size_t>(i)] = canonical_nan(stored[static_cast<size_t>(i)]);
      }
    }
    store(batch, row, first_col / kCols, std::span(stored).first(static_cast<size_t>(blocks)));
    store_codes<Element>(args_, flat(batch, row), first_col, codes.data(), count);
  }

  Stored encode_full_block(const float* x, const RowScaling& scaling, uint8_t* codes) const {
    constexpr int64_t kCols = Format::kBlockCols;
    const BlockScale<Stored> scale =
        encoder_.block_scale(encoder_.block_amax(x, kCols), scaling.pair);
    for (int64_t i = 0; i < kCols; ++i) {
      codes[i] = Format::template encode<Math>(x[i], scale.multiplier);
    }
    return scale.stored;
  }

  // 128x128 blocks: one row of tiles, each widened once and kept while its maximum is found.
  void quantize_band(int64_t batch, int64_t band) const {
    const int64_t first_row = band * kTile;
    const int64_t rows = std::min(kTile, problem_.rows - first_row);
    std::array<float, kTile> factors;
    for (int64_t i = 0; i < rows; ++i) {
      factors[static_cast<size_t>(i)] = source_.row_factor(flat(batch, first_row + i), 1.0F);
    }
    std::array<float, kTile * kTile> tile;
    std::array<uint8_t, kTile> codes;
    for (int64_t col = 0; col < problem_.cols; col += kTile) {
      const int64_t count = std::min(kTile, problem_.cols - col);
      AbsMax amax;
      for (int64_t i = 0; i < rows; ++i) {
        float* x = tile.data() + i * kTile;
        source_.load(flat(batch, first_row + i), factors[static_cast<size_t>(i)], col, count, x);
        amax.add(x, count);
      }
      BlockScale<Stored> scale = encoder_.block_scale(amax.or_zero(), ScalePair{});
      if constexpr (std::is_same_v<Stored, float>) scale.stored = canonical_nan(scale.stored);
      store(batch, band, col / kTile, std::span<const Stored>(&scale.stored, 1));
      for (int64_t i = 0; i < rows; ++i) {
        const float* x = tile.data() + i * kTile;
        for (int64_t j = 0; j < count; ++j) {
          codes[static_cast<size_t>(j)] = Format::template encode<Math>(x[j], scale.multiplier);
        }
        store_codes<Element>(args_, flat(batch, first_row + i), col, codes.data(), count);
      }
    }
  }

  void encode_run(int64_t flat_row, float factor, int64_t first_col, int64_t count,
                  float multiplier) const {
    std::array<float, kTile> x;
    std::array<uint8_t, kTile> codes;
    for (int64_t col = first_col; col < first_col + count; col += kTile) {
      const int64_t n = std::min(kTile, first_col + count - col);
      source_.load(flat_row, factor, col, n, x.data());
      for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
        codes[i] = Format::template encode<Math>(x[i], multiplier);
      }
      store_codes<Element>(args_, flat_row, col, codes.data(), n);
    }
  }

  void store(int64_t batch, int64_t row, int64_t block, std::span<const Stored> stored) const {
    const int64_t image_row = scale_row(args_.row_offsets, row);
    store_scales<Stored>(args_.scales, batch, image_row, block, stored);
    store_scales<Stored>(args_.extra_scales, batch, image_row, block, stored);
  }

  const QuantizeProblem& problem_;
  const QuantizeArgs& args_;
  const RowSource& source_;
  const EncodeScales& scales_;
  BlockEncoder<Format, Math> encoder_;
  int64_t segment_;  // Columns of a piece of work.
};

float batch_amax(const QuantizeProblem& problem, const QuantizeArgs& args, const RowSource& source,
                 int64_t batch) {
  const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, problem.cols));
  const uint32_t bits =
      parallel_max(valid_rows(problem, args, batch), grain, [&](int64_t begin, int64_t end) {
        AbsMax amax;
        std::array<float, kTile> x;
        for (int64_t i = begin; i < end; ++i) {
          const int64_t row = batch * problem.rows + i;
          const float factor = source.row_factor(row, 1.0F);
          for (int64_t col = 0; col < problem.cols; col += kTile) {
            const int64_t n = std::min(kTile, problem.cols - col);
            source.load_unscaled(row, factor, col, n, x.data());
            amax.add(x.data(), n);
          }
        }
        return float_bits(amax.or_zero());
      });
  return bits_float(bits);
}

void prepare_norm_rows(const QuantizeProblem& problem, const QuantizeArgs& args,
                       const RowSource& source) {
  if (problem.source != RowSourceKind::kAddRmsNorm && args.norm_output == nullptr) return;
  const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, problem.cols));
  parallel_for(problem.batch * problem.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (problem.source == RowSourceKind::kAddRmsNorm) source.add_residual(row);
      if (args.norm_output != nullptr) source.store_norm(row);
    }
  });
}

void run(const QuantizeProblem& problem, const QuantizeArgs& args, Stream /*stream*/) {
  // Scalars computed on the calling thread need the environment too.
  const FloatEnvironmentGuard guard;
  const RowSource source(problem, args);
  prepare_norm_rows(problem, args, source);
  clear_scales(args.scales);
  clear_scales(args.extra_scales);
  const auto amax = [&](int64_t batch) { return batch_amax(problem, args, source, batch); };
  const EncodeScales scales(problem, args, amax);
  scales.store_decode_scales();
  clear_row_scales(problem, args);
  visit_format_and_math(problem, [&]<BlockFormat Format, class Math>() {
    const Baseline<Format, Math> baseline(problem, args, source, scales);
    for (int64_t batch = 0; batch < problem.batch; ++batch) baseline.quantize_batch(batch, amax);
  });
}

Support supports(const QuantizeProblem& problem) { return cpu_only(problem.device); }

}  // namespace

const QuantizeImpl kQuantizeCpuBaseline{"cpu_baseline", supports, run};

}  // namespace narrowfloat
