// cpu_reference: the oracle. value = RN(code * factor of its block), one rounding to the output
// type (spec 7).
#include "formats/registry.h"
#include "ops/dequantize/row_decoder.h"
#include "runtime/float_environment.h"
#include "tensor/element_io.h"

namespace narrowfloat {
namespace {

template <BlockFormat Format, typename Layout>
void dequantize_row(const DequantizeProblem& problem, const DequantizeArgs& args, int64_t batch,
                    int64_t row) {
  const RowDecoder<Format> decoder(problem, args, batch, row);
  const int64_t flat = batch * problem.rows + row;
  const uint8_t* codes = args.values + flat * args.value_row_bytes;
  for (int64_t col = 0; col < problem.cols; ++col) {
    const int64_t block =
        Format::kBlockCols == 0 ? 0 : col / std::max<int64_t>(1, Format::kBlockCols);
    const float factor = decoder.template block_factor<Layout>(block);
    const float code = Format::Element::decode(code_at<typename Format::Element>(codes, col));
    const float value = mul_rn(code, factor);
    narrow(problem.output, &value, 1,
           element_pointer(args.output, problem.output, flat * args.output_stride + col));
  }
}

void run(const DequantizeProblem& problem, const DequantizeArgs& args, Stream /*stream*/) {
  const FloatEnvironmentGuard guard;
  visit_format(problem.format, [&]<BlockFormat Format>() {
    visit_layout(problem.layout, [&]<typename Layout>() {
      for (int64_t batch = 0; batch < problem.batch; ++batch) {
        for (int64_t row = 0; row < problem.rows; ++row) {
          dequantize_row<Format, Layout>(problem, args, batch, row);
        }
      }
    });
  });
}

Support supports(const DequantizeProblem& problem) { return cpu_only(problem.device); }

}  // namespace

const DequantizeImpl kDequantizeCpuReference{"cpu_reference", supports, run};

}  // namespace narrowfloat
