// Dequantizers that read swizzled scales in bands of rows (tensor/scale_band.h) give the oracle's
// bytes, with any number of threads.
#include <gtest/gtest.h>

#include "ops/dequantize/dequantize_problem.h"
#include "support/oracles_bytes.h"
#include "support/tensors.h"

namespace narrowfloat::testing {
namespace {

TEST(SwizzledBands, DequantizersGiveTheOraclesBytes) {
  for (const FormatId format :
       {FormatId::kNvfp4, FormatId::kNvfp4PerToken, FormatId::kMxfp4, FormatId::kMxfp8}) {
    SCOPED_TRACE(name(format));
    const Matrix input = Matrix::filled(
        {.dtype = DType::kBF16, .batch = 3, .rows = 300, .cols = 2080}, Fill::kNormalRows, 6);
    const QuantizedTensor tensor = quantized(
        input, {.format = format, .layout = ScaleLayoutId::kSwizzled128x4, .options = {}});
    expect_oracles_bytes("dequantize", dequantize_impls(),
                         [&] { return dequantized(tensor.view).elements(); });
  }
}

}  // namespace
}  // namespace narrowfloat::testing
