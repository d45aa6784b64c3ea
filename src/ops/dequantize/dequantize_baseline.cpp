// cpu_baseline: all cores through oneTBB. A row is decoded in segments: first the factors of its
// blocks, then codes through a table of the element type's values, then one narrowing loop.
#include <array>

#include "formats/registry.h"
#include "ops/dequantize/row_decoder.h"
#include "runtime/float_environment.h"
#include "runtime/parallel.h"
#include "tensor/element_io.h"

namespace narrowfloat {
namespace {

constexpr int64_t kDequantizeCols = 2048;
constexpr int64_t kDequantizeTask = 16384;

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
void dequantize_segment(const DequantizeProblem& problem, const DequantizeArgs& args,
                        int64_t flat_row, int64_t first_col) {
  constexpr int64_t kBlock = Format::kBlockCols == 0 ? kDequantizeCols : Format::kBlockCols;
  const RowDecoder<Format> decoder(problem, args, flat_row / problem.rows, flat_row % problem.rows);
  const uint8_t* codes = args.values + flat_row * args.value_row_bytes;
  const int64_t end = std::min(first_col + kDequantizeCols, problem.cols);
  std::array<float, kDequantizeCols> values;
  for (int64_t col = first_col; col < end; col += kBlock) {
    const int64_t block = Format::kBlockCols == 0 ? 0 : col / kBlock;
    decode_run<typename Format::Element>(codes, col, std::min(kBlock, end - col),
                                         decoder.template block_factor<Layout>(block),
                                         values.data() + (col - first_col));
  }
  narrow(problem.output, values.data(), end - first_col,
         element_pointer(args.output, problem.output, flat_row * args.output_stride + first_col));
}

void run(const DequantizeProblem& problem, const DequantizeArgs& args, Stream /*stream*/) {
  const int64_t per_row = ceil_div(problem.cols, kDequantizeCols);
  const int64_t grain = row_grain(kDequantizeTask, std::min(kDequantizeCols, problem.cols));
  visit_format(problem.format, [&]<BlockFormat Format>() {
    visit_layout(problem.layout, [&]<typename Layout>() {
      parallel_for(problem.batch * problem.rows * per_row, grain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          dequantize_segment<Format, Layout>(problem, args, i / per_row,
                                             i % per_row * kDequantizeCols);
        }
      });
    });
  });
}

Support supports(const DequantizeProblem& problem) { return cpu_only(problem.device); }

}  // namespace

const DequantizeImpl kDequantizeCpuBaseline{"cpu_baseline", supports, run};

}  // namespace narrowfloat
