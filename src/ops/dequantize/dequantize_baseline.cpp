// cpu_baseline, cpu_avx2 and cpu_avx512: all cores through oneTBB. A row is decoded in segments:
// first the factors of its blocks, then the codes. The baseline has a table of the element type's
// values, then one narrowing loop; the other two decode whole blocks with the kernels of their
// vector level (x86/decode_kernels.h). Outputs larger than the caches are written past them. Rows
// with swizzled scales are decoded in bands (tensor/scale_band.h).
#include <array>

#include "formats/registry.h"
#include "narrowfloat/runtime.h"
#include "ops/dequantize/row_decoder.h"
#include "ops/dequantize/x86/decode_kernels.h"
#include "runtime/float_environment.h"
#include "runtime/parallel.h"
#include "runtime/vector_level.h"
#include "tensor/element_io.h"
#include "tensor/scale_band.h"

namespace narrowfloat {
namespace {

constexpr int64_t kDequantizeCols = 2048;
constexpr int64_t kDequantizeTask = 16384;
constexpr int64_t kLine = 64;

template <typename Element>
constexpr auto decode_table() {
  std::array<float, 1U << Element::kBits> table{};
  for (size_t code = 0; code < table.size(); ++code) {
    table[code] = Element::decode(static_cast<uint8_t>(code));
  }
  return table;
}

// Decodes columns [col, col + count) times one factor.
template <typename Element>
void decode_run(const uint8_t* codes, int64_t col, int64_t count, float factor, float* out) {
  static constexpr auto kValues = decode_table<Element>();
  if constexpr (Element::kBits == 4) {
    const uint8_t* packed = codes + col / 2;
    for (int64_t i = 0; i < count / 2; ++i) {
      out[2 * i] = mul_rn(kValues[packed[i] & 0xFU], factor);
      out[2 * i + 1] = mul_rn(kValues[packed[i] >> 4], factor);
    }
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = mul_rn(kValues[codes[col + i]], factor);
  }
}

template <BlockFormat Format, typename Layout>
class SegmentDecoder {
 public:
  using Stored = typename Format::Stored;

  // kernels: null for the portable loops.
  SegmentDecoder(const DequantizeProblem& problem, const DequantizeArgs& args,
                 const DecodeKernels* kernels)
      : problem_(problem),
        args_(args),
        kernels_(kernels),
        is_streamed_(kernels != nullptr &&
                     problem.batch * problem.rows * problem.cols * element_bytes(problem.output) >
                         kStreamedBytes) {}

  // row_scales: the row's scales in linear order, if they are there.
  void decode(int64_t flat_row, int64_t first_col, const Stored* row_scales = nullptr) const {
    const Decoder decoder(problem_, args_, flat_row / problem_.rows, flat_row % problem_.rows,
                          row_scales);
    const uint8_t* codes = args_.values + flat_row * args_.value_row_bytes;
    const int64_t end = std::min(first_col + kDequantizeCols, problem_.cols);
    const int64_t done = decode_with_kernels(decoder, codes, flat_row, first_col, end);
    std::array<float, kDequantizeCols> values;
    for (int64_t col = first_col + done; col < end; col += kBlock) {
      const int64_t block = Format::kBlockCols == 0 ? 0 : col / kBlock;
      decode_run<Element>(codes, col, std::min(kBlock, end - col),
                          decoder.template block_factor<Layout>(block),
                          values.data() + (col - first_col));
    }
    narrow(problem_.output, values.data() + done, end - first_col - done,
           output_at(flat_row, first_col + done));
  }

  void decode_row(int64_t flat_row, const Stored* row_scales) const {
    for (int64_t col = 0; col < problem_.cols; col += kDequantizeCols) {
      decode(flat_row, col, row_scales);
    }
  }

  // After the last segment of a task.
  void finish() const {
    if (is_streamed_) kernels_->finish_stream();
  }

 private:
  using Decoder = RowDecoder<Format>;
  using Element = typename Format::Element;
  static constexpr int64_t kBlock = Format::kBlockCols == 0 ? kDequantizeCols : Format::kBlockCols;
  // A block of the kernels; a tensor with one scale consists of blocks with the same factor.
  static constexpr int64_t kKernelCols = Format::kBlockCols == 0 ? 128 : Format::kBlockCols;
  static constexpr DecodedBlock kKernelBlock =
      Element::kBits == 4
          ? (kKernelCols == 16 ? DecodedBlock::kE2M1Of16 : DecodedBlock::kE2M1Of32)
          : (kKernelCols == 32 ? DecodedBlock::kE4M3Of32 : DecodedBlock::kE4M3Of128);

  [[nodiscard]] void* output_at(int64_t flat_row, int64_t col) const {
    return element_pointer(args_.output, problem_.output, flat_row * args_.output_stride + col);
  }

  // Decodes the whole blocks of [first_col, end). Returns the number of their columns, 0 without
  // kernels.
  int64_t decode_with_kernels(const Decoder& decoder, const uint8_t* codes, int64_t flat_row,
                              int64_t first_col, int64_t end) const {
    const int64_t blocks = (end - first_col) / kKernelCols;
    if (kernels_ == nullptr || blocks == 0) return 0;
    std::array<float, kMaxDecodedBlocks> factors;
    find_factors(decoder, first_col / kKernelCols, blocks, factors.data());
    const DecodedType type = problem_.output == DType::kF32    ? DecodedType::kF32
                             : problem_.output == DType::kBF16 ? DecodedType::kBf16
                                                               : DecodedType::kF16;
    const auto kernel = kernels_->values[static_cast<int>(kKernelBlock)][static_cast<int>(type)];
    const uint8_t* first = codes + first_col * Element::kBits / 8;
    void* output = output_at(flat_row, first_col);
    const int64_t count = blocks * kKernelCols;
    if (is_streamed_) {
      prefetch_codes(first, count);
      alignas(64) std::array<float, kDequantizeCols> buffer;
      kernel(first, blocks, factors.data(), buffer.data());
      kernels_->stream(output, buffer.data(), count * element_bytes(problem_.output));
    } else {
      kernel(first, blocks, factors.data(), output);
    }
    return count;
  }

  // The codes of later segments, so that reads go on while a segment is written past the caches.
  static void prefetch_codes(const uint8_t* codes, int64_t count) {
    constexpr int64_t kBytesAhead = 2048;
    for (int64_t byte = 0; byte < count * Element::kBits / 8; byte += kLine) {
      __builtin_prefetch(codes + kBytesAhead + byte);
    }
  }

  void find_factors(const Decoder& decoder, int64_t first_block, int64_t blocks,
                    float* factors) const {
    if constexpr (Format::kScaleType == ScaleType::kF32) {
      for (int64_t i = 0; i < blocks; ++i) {
        const int64_t block = Format::kBlockCols == 0 ? 0 : first_block + i;
        factors[i] = decoder.template block_factor<Layout>(block);
      }
    } else {
      std::array<Stored, kMaxDecodedBlocks> scales;
      decoder.template load_scales<Layout>(first_block, blocks, scales.data());
      if constexpr (Format::kScaleType == ScaleType::kE4M3) {
        kernels_->e4m3_factors(scales.data(), blocks, decoder.global_scale(),
                               problem_.global_scale_divides, factors);
      } else {
        kernels_->ue8m0_factors(scales.data(), blocks, factors);
      }
    }
  }

  const DequantizeProblem& problem_;
  const DequantizeArgs& args_;
  const DecodeKernels* kernels_;
  bool is_streamed_;
};

// Decodes whole rows in bands. Returns false where the problem has none.
template <BlockFormat Format, typename Layout>
bool decode_bands(const SegmentDecoder<Format, Layout>& segments, const DequantizeProblem& problem,
                  const DequantizeArgs& args) {
  if constexpr (Layout::kId == ScaleLayoutId::kSwizzled128x4 &&
                sizeof(typename Format::Stored) == 1) {
    const BandedScales scales{problem.batch, problem.rows, args.scales.blocks};
    const ScaleBands bands = ScaleBands::of(scales, num_threads());
    if (bands.run == 0) return false;
    const int64_t grain = row_grain(kDequantizeTask, bands.rows() * problem.cols);
    parallel_for(problem.batch * bands.per_matrix, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t batch = i / bands.per_matrix;
        ScaleBand band(bands, args.scales.blocks, i % bands.per_matrix);
        band.load(args.scales, batch);
        for (int64_t index = 0; index < bands.rows(); ++index) {
          const int64_t row = band.row(index);
          if (row >= problem.rows) continue;
          segments.decode_row(batch * problem.rows + row, band.scales_of(index));
        }
      }
      segments.finish();
    });
    return true;
  }
  return false;
}

void run_with(const DecodeKernels* kernels, const DequantizeProblem& problem,
              const DequantizeArgs& args) {
  const int64_t per_row = ceil_div(problem.cols, kDequantizeCols);
  const int64_t grain = row_grain(kDequantizeTask, std::min(kDequantizeCols, problem.cols));
  visit_format(problem.format, [&]<BlockFormat Format>() {
    visit_layout(problem.layout, [&]<typename Layout>() {
      const SegmentDecoder<Format, Layout> segments(problem, args, kernels);
      if (decode_bands(segments, problem, args)) return;
      parallel_for(problem.batch * problem.rows * per_row, grain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          segments.decode(i / per_row, i % per_row * kDequantizeCols);
        }
        segments.finish();
      });
    });
  });
}

Support supports(const DequantizeProblem& problem) { return cpu_only(problem.device); }

void run(const DequantizeProblem& problem, const DequantizeArgs& args, Stream /*stream*/) {
  run_with(nullptr, problem, args);
}

#if defined(NARROWFLOAT_VECTOR_LEVELS)

template <VectorLevel kLevel>
Support supports_level(const DequantizeProblem& problem) {
  return cpu_with(problem.device, kLevel);
}

template <VectorLevel kLevel>
void run_level(const DequantizeProblem& problem, const DequantizeArgs& args, Stream /*stream*/) {
  run_with(kLevel == VectorLevel::kAvx2 ? &kDecodeKernelsAvx2 : &kDecodeKernelsAvx512, problem,
           args);
}

#endif

}  // namespace

const DequantizeImpl kDequantizeCpuBaseline{"cpu_baseline", supports, run};
#if defined(NARROWFLOAT_VECTOR_LEVELS)
const DequantizeImpl kDequantizeCpuAvx2{"cpu_avx2", supports_level<VectorLevel::kAvx2>,
                                        run_level<VectorLevel::kAvx2>};
const DequantizeImpl kDequantizeCpuAvx512{"cpu_avx512", supports_level<VectorLevel::kAvx512>,
                                          run_level<VectorLevel::kAvx512>};
#endif

}  // namespace narrowfloat
