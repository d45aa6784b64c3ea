// Quantizers that store swizzled scales in bands of rows (tensor/scale_band.h) give the oracle's
// bytes, with any number of threads.
#include <vector>

#include <gtest/gtest.h>

#include "ops/quantize/quantize_problem.h"
#include "support/oracles_bytes.h"
#include "support/tensors.h"

namespace narrowfloat::testing {
namespace {

struct BandCase {
  FormatId format;
  DType dtype;
  int64_t rows;
  int64_t cols;
};

TEST(SwizzledBands, QuantizersGiveTheOraclesBytes) {
  const Vector valid = Vector::of(DType::kI32, std::vector<int32_t>{200, 31, 0});
  // Rows and matrices end inside tiles, and 128 columns of MXFP8 pad more blocks.
  for (const BandCase& one : {BandCase{FormatId::kNvfp4, DType::kF32, 257, 1040},
                              BandCase{FormatId::kNvfp4PerToken, DType::kBF16, 200, 2064},
                              BandCase{FormatId::kMxfp4, DType::kBF16, 130, 4096},
                              BandCase{FormatId::kMxfp8, DType::kF16, 300, 2080}}) {
    SCOPED_TRACE(name(one.format));
    const Matrix input = Matrix::filled(
        {.dtype = one.dtype, .batch = 3, .rows = one.rows, .cols = one.cols}, Fill::kNormalRows, 5);
    QuantizeTo to{.format = one.format, .layout = ScaleLayoutId::kSwizzled128x4, .options = {}};
    if (one.format == FormatId::kMxfp8) to.alignment = 128;
    const auto compute = [&] { return bytes_of(quantized(input, to)); };
    expect_oracles_bytes("quantize", quantize_impls(), compute);
    to.options.valid_rows = valid.view();
    expect_oracles_bytes("quantize", quantize_impls(), compute);
  }
}

}  // namespace
}  // namespace narrowfloat::testing
