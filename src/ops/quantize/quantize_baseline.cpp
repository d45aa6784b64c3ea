// cpu_baseline, cpu_avx2 and cpu_avx512: run on all cores through oneTBB and give the oracle's
// bytes. The baseline is portable C++ that compilers vectorise. The other two quantize whole blocks
// with the kernels of their vector level (x86/block_kernels.h) and share everything else. They
// write large outputs past the caches.
//
// Work is cut into chunks of one row (up to 2048 columns), 128x128 tiles, whole rows where a row
// needs a statistic first, or bands of rows where scales are swizzled (tensor/scale_band.h), over
// all batches at once. A chunk is widened to fp32 in a stack buffer; maxima, codes and packing are
// loops over that buffer. Kernels read plain rows where they are. No buffer is larger than one tile
// of fp32; the heap holds only one number per batch, or the sorted list of rows.
#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "narrowfloat/runtime.h"
#include "ops/quantize/block_encoder.h"
#include "ops/quantize/encode_scales.h"
#include "ops/quantize/kernel_encoder.h"
#include "ops/quantize/quantize_impls.h"
#include "ops/quantize/quantize_output.h"
#include "ops/quantize/row_chunks.h"
#include "ops/quantize/row_source.h"
#include "runtime/float_environment.h"
#include "runtime/parallel.h"
#include "runtime/vector_level.h"
#include "tensor/grouped_rows.h"
#include "tensor/scale_band.h"

namespace narrowfloat {
namespace {

constexpr int64_t kTile = 128;
using AmaxOfBatches = EncodeScales::AmaxOfBatches;

template <BlockFormat Format, class Math>
class BaselineQuantizer {
 public:
  using Stored = typename Format::Stored;
  using Element = typename Format::Element;

  // kernels: null for the portable loops.
  BaselineQuantizer(const QuantizeProblem& problem, const QuantizeArgs& args,
                    const RowSource& source, const EncodeScales& scales,
                    const BlockKernels* kernels)
      : problem_(problem),
        args_(args),
        source_(source),
        scales_(scales),
        encoder_(problem),
        kernels_(kernels),
        is_streamed_(kernels != nullptr &&
                     problem.batch * problem.rows * args.value_row_bytes > kStreamedBytes) {
    if constexpr (kHasKernels) {
      if (kernels != nullptr) kernel_encoder_.emplace(problem, *kernels);
    }
  }

  void quantize_all(const AmaxOfBatches& amax) const {
    if constexpr (Format::kId == FormatId::kFp8Tensor) {
      quantize_tensors(amax);
    } else if constexpr (Format::kBlockRows > 1) {
      quantize_bands();
    } else if (problem_.has_row_list) {
      quantize_listed_rows();
    } else if (!quantize_scale_bands()) {
      const RowChunks chunks(problem_, Format::kHasRowScale);
      chunks.for_each(
          problem_.batch * problem_.rows,
          [&](const RowChunk& chunk) {
            const int64_t batch = chunk.row / problem_.rows;
            const int64_t row = chunk.row % problem_.rows;
            if (row >= valid_rows(problem_, args_, batch)) return;
            quantize_chunk(batch, row, chunk);
          },
          [&] { finish_task(); });
    }
  }

 private:
  // A row's place in a band, which keeps its scales; without a band they are stored at once.
  struct BandRow {
    ScaleBand* band = nullptr;
    int64_t index = 0;
  };
  // A row and what its blocks are encoded with.
  struct Row {
    int64_t batch;
    int64_t row;
    float factor;
    RowScaling scaling;
    BandRow band_row;
  };

  // Formats whose blocks lie in one row.
  static constexpr bool kHasKernels = Format::kBlockRows == 1;
  // Formats whose scales are bytes; others have no swizzled layout.
  static constexpr bool kHasScaleBands = kHasKernels && sizeof(Stored) == 1;
  // 128x128 tiles whose rows are read side by side: 256 KiB of fp32 stay in the cache.
  static constexpr int64_t kKernelTiles = 4;

  [[nodiscard]] int64_t flat(int64_t batch, int64_t row) const {
    return batch * problem_.rows + row;
  }

  // A row that is listed twice is quantized once.
  void quantize_listed_rows() const {
    std::vector<int32_t> rows(args_.row_list.begin(), args_.row_list.end());
    std::erase_if(rows, [&](int32_t row) { return row < 0 || row >= problem_.rows; });
    std::sort(rows.begin(), rows.end());
    rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
    const RowChunks chunks(problem_, Format::kHasRowScale);
    chunks.for_each(
        static_cast<int64_t>(rows.size()),
        [&](const RowChunk& chunk) {
          quantize_chunk(0, rows[static_cast<size_t>(chunk.row)], chunk);
        },
        [&] { finish_task(); });
  }

  // Quantizes whole rows in bands. Returns false where the problem has none.
  [[nodiscard]] bool quantize_scale_bands() const {
    if constexpr (!kHasScaleBands) return false;
    if (!is_swizzled(args_.scales) && !is_swizzled(args_.extra_scales)) return false;
    const BandedScales scales{problem_.batch, problem_.rows, args_.scales.blocks};
    const ScaleBands bands = ScaleBands::of(scales, num_threads());
    if (bands.run == 0) return false;
    const int64_t grain = row_grain(kQuantizeTask, bands.rows() * problem_.cols);
    parallel_for(problem_.batch * bands.per_matrix, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        quantize_scale_band(bands, i / bands.per_matrix, i % bands.per_matrix);
      }
      finish_task();
    });
    return true;
  }

  void quantize_scale_band(const ScaleBands& bands, int64_t batch, int64_t band_index) const {
    const int64_t rows = valid_rows(problem_, args_, batch);
    ScaleBand band(bands, args_.scales.blocks, band_index);
    bool has_rows = false;
    const auto for_swizzled = [&](const auto& visitor) {
      for (const ScaleView& scales : {args_.scales, args_.extra_scales}) {
        if (is_swizzled(scales)) visitor(scales);
      }
    };
    for (int64_t index = 0; index < bands.rows(); ++index) {
      const int64_t row = band.row(index);
      if (row >= rows) continue;
      for_swizzled([&](const ScaleView& scales) { band.fetch(scales, batch, index); });
      quantize_chunk(batch, row, {row, 0, problem_.cols}, {&band, index});
      has_rows = true;
    }
    if (!has_rows) return;
    band.clear_others();
    for_swizzled([&](const ScaleView& scales) { band.store(scales, batch); });
  }

  static bool is_swizzled(const ScaleView& scales) {
    return scales.data != nullptr && scales.layout == ScaleLayoutId::kSwizzled128x4;
  }

  void quantize_chunk(int64_t batch, int64_t row, const RowChunk& chunk,
                      const BandRow& band_row = {}) const {
    const int64_t flat_row = flat(batch, row);
    const float factor = source_.row_factor(flat_row, scales_.encode(batch, row));
    const Row to_encode{batch, row, factor, row_scaling(batch, row, factor), band_row};
    std::array<float, kSegmentCols> x;
    for (int64_t done = 0; done < chunk.count; done += kSegmentCols) {
      const int64_t n = std::min(kSegmentCols, chunk.count - done);
      const int64_t col = chunk.col + done;
      const int64_t by_kernels = encode_with_kernels(to_encode, col, n);
      if (by_kernels == n) continue;
      const std::span<float> rest = std::span(x).first(static_cast<size_t>(n - by_kernels));
      source_.load(flat_row, factor, col + by_kernels, n - by_kernels, rest.data());
      encode_blocks(to_encode, col + by_kernels, rest);
    }
    if (chunk.col + chunk.count == problem_.cols) clear_value_padding(problem_, args_, flat_row);
  }

  // Calls encode() with the place of the codes, or, for large outputs, with a buffer that is then
  // written past the caches.
  template <typename Encode>
  void store_kernel_codes(uint8_t* codes, int64_t size_bytes, const Encode& encode) const {
    if (!is_streamed_) return encode(codes);
    alignas(64) std::array<uint8_t, kSegmentCols> buffer;
    encode(buffer.data());
    kernels_->stream(codes, buffer.data(), size_bytes);
  }

  // At the end of a task that calls store_kernel_codes().
  void finish_task() const {
    if (is_streamed_) kernels_->finish_stream();
  }

  // Up to kSegmentCols elements as kernels read them; `buffer` has room for as many.
  [[nodiscard]] ElementRun run_of(int64_t flat_row, float factor, int64_t col, int64_t count,
                                  float* buffer) const {
    if (problem_.input == DType::kF8E4M3) {
      source_.load(flat_row, factor, col, count, buffer);
      return {buffer, DType::kF32};
    }
    return {source_.narrow_row(flat_row, factor, col, count, buffer), problem_.input};
  }

  // Encodes the whole blocks of up to kSegmentCols columns. Returns the number of their columns, 0
  // without kernels.
  int64_t encode_with_kernels(const Row& row, int64_t col, int64_t cols) const {
    if constexpr (kHasKernels) {
      if (!kernel_encoder_) return 0;
      const int64_t blocks = cols / Format::kBlockCols;
      const int64_t count = blocks * Format::kBlockCols;
      if (blocks == 0) return 0;
      const int64_t flat_row = flat(row.batch, row.row);
      std::array<float, kSegmentCols> buffer;
      const ElementRun run = run_of(flat_row, row.factor, col, count, buffer.data());
      std::array<Stored, kMaxKernelBlocks> stored;
      uint8_t* codes = args_.values + flat_row * args_.value_row_bytes + col * Element::kBits / 8;
      store_kernel_codes(codes, count * Element::kBits / 8, [&](uint8_t* out) {
        kernel_encoder_->encode(run, blocks, row.scaling, stored.data(), out);
      });
      const std::span<Stored> scales = std::span(stored).first(static_cast<size_t>(blocks));
      for (Stored& scale : scales) scale = canonical_scale(scale);
      store_row_scales(row, col / Format::kBlockCols, scales);
      return count;
    }
    return 0;
  }

  void store_row_scales(const Row& row, int64_t first_block, std::span<const Stored> scales) const {
    bool is_kept = false;
    if constexpr (kHasScaleBands) {
      if (row.band_row.band != nullptr) {
        row.band_row.band->keep(row.band_row.index, first_block, scales);
        is_kept = true;
      }
    }
    const int64_t packed_row = scale_row(args_.row_offsets, row.row);
    for (const ScaleView& output : {args_.scales, args_.extra_scales}) {
      if (is_kept && is_swizzled(output)) continue;
      store_scale_runs<Stored>(output, row.batch, packed_row, first_block, scales);
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
    uint32_t largest = 0;
    std::array<float, kSegmentCols> x;
    for (int64_t col = 0; col < problem_.cols; col += kSegmentCols) {
      const int64_t n = std::min(kSegmentCols, problem_.cols - col);
      if (kernels_ != nullptr) {
        largest = std::max(largest,
                           run_amax_bits(*kernels_, run_of(flat_row, factor, col, n, x.data()), n));
        continue;
      }
      AbsMax amax;
      source_.load(flat_row, factor, col, n, x.data());
      amax.add(x.data(), n);
      largest = std::max(largest, float_bits(amax.or_zero()));
    }
    return largest;
  }

  void encode_blocks(const Row& row, int64_t first_col, std::span<const float> x) const {
    constexpr int64_t kCols = Format::kBlockCols;
    std::array<uint8_t, kSegmentCols> codes;
    std::array<Stored, kSegmentCols / kCols> stored;
    const auto count = static_cast<int64_t>(x.size());
    const int64_t blocks = ceil_div(count, kCols);
    const int64_t full = encoder_.is_plain() ? count / kCols : 0;
    for (int64_t i = 0; i < full; ++i) {
      stored[static_cast<size_t>(i)] =
          encode_full_block(x.data() + i * kCols, row.scaling, codes.data() + i * kCols);
    }
    for (int64_t i = full; i < blocks; ++i) {
      const int64_t n = std::min(kCols, count - i * kCols);
      stored[static_cast<size_t>(i)] =
          encoder_.encode(x.data() + i * kCols, n, row.scaling, codes.data() + i * kCols);
    }
    for (int64_t i = 0; i < blocks; ++i) {
      stored[static_cast<size_t>(i)] = canonical_scale(stored[static_cast<size_t>(i)]);
    }
    store_row_scales(row, first_col / kCols, std::span(stored).first(static_cast<size_t>(blocks)));
    store_codes<Element>(args_, flat(row.batch, row.row), first_col, codes.data(), count);
  }

  Stored encode_full_block(const float* x, const RowScaling& scaling, uint8_t* codes) const {
    constexpr int64_t kCols = Format::kBlockCols;
    const BlockScale<Stored> scale =
        encoder_.block_scale(block_amax<Format>(x, kCols), scaling.pair);
    encode_values<Format, Math>(x, kCols, scale.multiplier, codes);
    return scale.stored;
  }

  // Quantizes 128x128 blocks. A norm reads whole rows, so its bands are not split into columns.
  void quantize_bands() const {
    const int64_t bands = ceil_div(problem_.rows, kTile);
    const int64_t tiles = ceil_div(problem_.cols, kTile);
    const int64_t usual = kernels_ == nullptr ? 1 : kKernelTiles;
    const int64_t tiles_at_once = is_norm(problem_.source) ? std::max<int64_t>(1, tiles) : usual;
    const int64_t chunks = ceil_div(tiles, tiles_at_once);
    parallel_for(problem_.batch * bands * chunks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t first = i % chunks * tiles_at_once;
        quantize_band(i / chunks / bands, i / chunks % bands, first,
                      std::min(first + tiles_at_once, tiles));
      }
    });
  }

  // Quantizes whole tiles of a band with the kernels, at most kKernelTiles. Returns false, with
  // nothing that counts stored, where the kernels do not cover them.
  bool quantize_tiles_with_kernels(int64_t batch, int64_t band, int64_t first_tile,
                                   int64_t tiles) const {
    const int64_t first_row = flat(batch, band * kTile);
    const int64_t rows = std::min(kTile, problem_.rows - band * kTile);
    const int64_t col = first_tile * kTile;
    if (kernels_ == nullptr || source_.stored_row(first_row, col) == nullptr) return false;
    const auto run = [&](int64_t row) {
      return ElementRun{source_.stored_row(first_row + row, col), problem_.input};
    };
    const int input = run(0).kernel_input();
    std::array<float, kMaxKernelBlocks> maxima;
    std::array<AbsMax, kKernelTiles> largest;
    for (int64_t row = 0; row < rows; ++row) {
      const auto kernel = kernels_->maxima[input][static_cast<int>(KernelBlock::k128)];
      if (!kernel(run(row).first, tiles, maxima.data())) return false;
      for (size_t i = 0; i < kKernelTiles; ++i) largest[i].add(maxima[i]);
    }
    std::array<Stored, kKernelTiles> scales;
    std::array<float, kKernelTiles> multipliers;
    for (size_t i = 0; i < static_cast<size_t>(tiles); ++i) {
      const BlockScale<Stored> scale = encoder_.block_scale(largest[i].or_zero(), ScalePair{});
      if (!has_kernel_codes<Math>(scale.multiplier)) return false;
      scales[i] = canonical_scale(scale.stored);
      multipliers[i] = scale.multiplier;
    }
    store(batch, band, first_tile, std::span(scales).first(static_cast<size_t>(tiles)));
    const auto kernel = kernels_->codes[input][static_cast<int>(KernelCodes::kE4M3Of128)];
    for (int64_t row = 0; row < rows; ++row) {
      kernel(run(row).first, tiles, multipliers.data(),
             args_.values + (first_row + row) * args_.value_row_bytes + col);
    }
    return true;
  }

  // Quantizes tiles [first_tile, end_tile) of a band. Each is widened once and kept while its
  // maximum is found.
  void quantize_band(int64_t batch, int64_t band, int64_t first_tile, int64_t end_tile) const {
    const int64_t whole_tiles = std::min(end_tile, problem_.cols / kTile) - first_tile;
    if (whole_tiles > 0 && whole_tiles <= kKernelTiles &&
        quantize_tiles_with_kernels(batch, band, first_tile, whole_tiles)) {
      first_tile += whole_tiles;
    }
    const int64_t first_row = band * kTile;
    const int64_t rows = std::min(kTile, problem_.rows - first_row);
    std::array<float, kTile> factors;
    for (int64_t i = 0; i < rows; ++i) {
      factors[static_cast<size_t>(i)] = source_.row_factor(flat(batch, first_row + i), 1.0F);
    }
    std::array<float, kTile * kTile> values;
    for (int64_t tile = first_tile; tile < end_tile; ++tile) {
      const int64_t col = tile * kTile;
      const int64_t count = std::min(kTile, problem_.cols - col);
      AbsMax amax;
      for (int64_t i = 0; i < rows; ++i) {
        float* x = values.data() + i * kTile;
        source_.load(flat(batch, first_row + i), factors[static_cast<size_t>(i)], col, count, x);
        amax.add(x, count);
      }
      const BlockScale<Stored> scale = encoder_.block_scale(amax.or_zero(), ScalePair{});
      const Stored stored = canonical_scale(scale.stored);
      store(batch, band, tile, std::span<const Stored>(&stored, 1));
      for (int64_t i = 0; i < rows; ++i) {
        const float* x = values.data() + i * kTile;
        const int64_t flat_row = flat(batch, first_row + i);
        const ElementRun run{x, DType::kF32};
        if (count == kTile && has_run_codes(run, 1, scale.multiplier)) {
          store_run_codes(run, 1, scale.multiplier,
                          args_.values + flat_row * args_.value_row_bytes + col);
        } else {
          encode_columns(flat_row, col, x, count, scale.multiplier);
        }
      }
    }
  }

  void quantize_tensors(const AmaxOfBatches& amax) const {
    std::vector<float> multipliers;
    for (int64_t batch = 0; batch < problem_.batch; ++batch) {
      const BlockScale<float> scale =
          args_.fp8_decode_scale
              ? Fp8Tensor::given_scale(*args_.fp8_decode_scale)
              : Fp8Tensor::block_scale<Math>(amax(batch, 1), ScalePair{}, problem_.rules);
      const float stored = canonical_nan(scale.stored);
      store(batch, 0, 0, std::span(&stored, 1));
      multipliers.push_back(scale.multiplier);
    }
    const RowChunks chunks(problem_, false);
    chunks.for_each(
        problem_.batch * problem_.rows,
        [&](const RowChunk& chunk) {
          const float multiplier = multipliers[static_cast<size_t>(chunk.row / problem_.rows)];
          const float factor = source_.row_factor(chunk.row, 1.0F);
          for (int64_t done = 0; done < chunk.count; done += kSegmentCols) {
            encode_segment(chunk.row, factor, chunk.col + done,
                           std::min(kSegmentCols, chunk.count - done), multiplier);
          }
        },
        [&] { finish_task(); });
  }

  // Whether the kernels cover `blocks` times 128 elements with a known multiplier.
  [[nodiscard]] bool has_run_codes(const ElementRun& run, int64_t blocks, float multiplier) const {
    if (kernels_ == nullptr || !has_kernel_codes<Math>(multiplier)) return false;
    std::array<float, kMaxKernelBlocks> maxima;
    return kernels_->maxima[run.kernel_input()][static_cast<int>(KernelBlock::k128)](
        run.first, blocks, maxima.data());
  }

  void store_run_codes(const ElementRun& run, int64_t blocks, float multiplier,
                       uint8_t* codes) const {
    std::array<float, kMaxKernelBlocks> multipliers;
    multipliers.fill(multiplier);
    kernels_->codes[run.kernel_input()][static_cast<int>(KernelCodes::kE4M3Of128)](
        run.first, blocks, multipliers.data(), codes);
  }

  // The kernels' part of encode_segment(). Returns the number of columns, 0 where the kernels do
  // not cover them.
  int64_t encode_segment_with_kernels(int64_t flat_row, float factor, int64_t col, int64_t count,
                                      float multiplier) const {
    const int64_t blocks = count / kTile;
    if (kernels_ == nullptr || blocks == 0) return 0;
    std::array<float, kSegmentCols> buffer;
    const ElementRun run = run_of(flat_row, factor, col, blocks * kTile, buffer.data());
    if (!has_run_codes(run, blocks, multiplier)) return 0;
    uint8_t* codes = args_.values + flat_row * args_.value_row_bytes + col;
    store_kernel_codes(codes, blocks * kTile,
                       [&](uint8_t* out) { store_run_codes(run, blocks, multiplier, out); });
    return blocks * kTile;
  }

  // Encodes up to kSegmentCols columns with a known multiplier.
  void encode_segment(int64_t flat_row, float factor, int64_t col, int64_t count,
                      float multiplier) const {
    const int64_t end = col + count;
    col += encode_segment_with_kernels(flat_row, factor, col, count, multiplier);
    std::array<float, kTile> x;
    for (; col < end; col += kTile) {
      const int64_t n = std::min(kTile, end - col);
      source_.load(flat_row, factor, col, n, x.data());
      encode_columns(flat_row, col, x.data(), n, multiplier);
    }
  }

  // Encodes up to 128 columns with a known multiplier.
  void encode_columns(int64_t flat_row, int64_t col, const float* x, int64_t count,
                      float multiplier) const {
    std::array<uint8_t, kTile> codes;
    encode_values<Format, Math>(x, count, multiplier, codes.data());
    store_codes<Element>(args_, flat_row, col, codes.data(), count);
  }

  void store(int64_t batch, int64_t row, int64_t block, std::span<const Stored> stored) const {
    const int64_t packed_row = scale_row(args_.row_offsets, row);
    store_scales<Stored>(args_.scales, batch, packed_row, block, stored);
    store_scales<Stored>(args_.extra_scales, batch, packed_row, block, stored);
  }

  const QuantizeProblem& problem_;
  const QuantizeArgs& args_;
  const RowSource& source_;
  const EncodeScales& scales_;
  BlockEncoder<Format, Math> encoder_;
  const BlockKernels* kernels_;
  bool is_streamed_;
  std::optional<KernelEncoder<Format, Math>> kernel_encoder_;
};

// NOLINTNEXTLINE(readability-function-size): the problem's parts, the kernels, the range.
float amax_of_batches(const QuantizeProblem& problem, const QuantizeArgs& args,
                      const RowSource& source, const BlockKernels* kernels, int64_t first_batch,
                      int64_t batches) {
  const RowChunks chunks(problem, false);
  const uint32_t bits = chunks.max(batches * problem.rows, [&](const RowChunk& chunk) {
    const int64_t batch = first_batch + chunk.row / problem.rows;
    if (chunk.row % problem.rows >= valid_rows(problem, args, batch)) return uint32_t{0};
    const int64_t row = first_batch * problem.rows + chunk.row;
    const float factor = source.row_factor(row, 1.0F);
    const bool has_kernels = kernels != nullptr && problem.input != DType::kF8E4M3;
    uint32_t largest = 0;
    std::array<float, kSegmentCols> x;
    for (int64_t col = chunk.col; col < chunk.col + chunk.count; col += kSegmentCols) {
      const int64_t n = std::min(kSegmentCols, chunk.col + chunk.count - col);
      if (has_kernels) {
        const void* first = source.narrow_row(row, factor, col, n, x.data());
        largest = std::max(largest, run_amax_bits(*kernels, {first, problem.input}, n));
        continue;
      }
      AbsMax amax;
      source.load_unscaled(row, factor, col, n, x.data());
      amax.add(x.data(), n);
      largest = std::max(largest, float_bits(amax.or_zero()));
    }
    return largest;
  });
  return bits_float(bits);
}

void prepare_norm_rows(const QuantizeProblem& problem, const QuantizeArgs& args,
                       const RowSource& source) {
  if (problem.source != RowSourceKind::kAddRmsNorm && args.norm_output == nullptr) return;
  const int64_t grain = row_grain(kQuantizeTask, problem.cols);
  parallel_for(problem.batch * problem.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (problem.source == RowSourceKind::kAddRmsNorm) source.add_residual(row);
      if (args.norm_output != nullptr) source.store_norm(row);
    }
  });
}

void run_with(const BlockKernels* kernels, const QuantizeProblem& problem,
              const QuantizeArgs& args) {
  // The calling thread computes scalars and needs the environment too.
  const FloatEnvironmentGuard guard;
  const RowSource source(problem, args, kernels == nullptr ? nullptr : &kernels->rows);
  prepare_norm_rows(problem, args, source);
  for (const ScaleView& scales : {args.scales, args.extra_scales}) {
    if (has_unwritten_scales(problem, scales)) clear_scales(scales);
  }
  const auto amax = [&](int64_t first_batch, int64_t batches) {
    return amax_of_batches(problem, args, source, kernels, first_batch, batches);
  };
  const EncodeScales scales(problem, args, amax);
  scales.store_decode_scales();
  clear_row_scales(problem, args);
  visit_format_and_math(problem, [&]<BlockFormat Format, class Math>() {
    const BaselineQuantizer<Format, Math> baseline(problem, args, source, scales, kernels);
    baseline.quantize_all(amax);
  });
}

Support supports(const QuantizeProblem& problem) { return cpu_only(problem.device); }

void run(const QuantizeProblem& problem, const QuantizeArgs& args, Stream /*stream*/) {
  run_with(nullptr, problem, args);
}

#if defined(NARROWFLOAT_VECTOR_LEVELS)

template <VectorLevel kLevel>
Support supports_level(const QuantizeProblem& problem) {
  return cpu_with(problem.device, kLevel);
}

template <VectorLevel kLevel>
void run_level(const QuantizeProblem& problem, const QuantizeArgs& args, Stream /*stream*/) {
  run_with(kLevel == VectorLevel::kAvx2 ? &kBlockKernelsAvx2 : &kBlockKernelsAvx512, problem, args);
}

#endif

}  // namespace

const QuantizeImpl kQuantizeCpuBaseline{"cpu_baseline", supports, run};
#if defined(NARROWFLOAT_VECTOR_LEVELS)
const QuantizeImpl kQuantizeCpuAvx2{"cpu_avx2", supports_level<VectorLevel::kAvx2>,
                                    run_level<VectorLevel::kAvx2>};
const QuantizeImpl kQuantizeCpuAvx512{"cpu_avx512", supports_level<VectorLevel::kAvx512>,
                                      run_level<VectorLevel::kAvx512>};
#endif

}  // namespace narrowfloat
