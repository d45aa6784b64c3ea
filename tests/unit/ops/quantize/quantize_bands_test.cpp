// Quantizers that store swizzled scales in bands of rows (tensor/scale_band.h) give the oracle's
// bytes, with any number of threads.
#include <utility>
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

QuantizedTensor empty_tensor(const Matrix& input, ScaleLayoutId layout) {
  return QuantizedTensor(quantized_layout(FormatId::kNvfp4, input.shape().rows, input.shape().cols,
                                          {.scale_layout = layout}));
}

// Rows end inside a tile, and a run of blocks inside a group of 4.
TEST(SwizzledBands, NormsStoreScalesInTwoLayouts) {
  const Matrix input =
      Matrix::filled({.dtype = DType::kBF16, .rows = 130, .cols = 1040}, Fill::kNormalRows, 6);
  const Matrix weight =
      Matrix::filled({.dtype = DType::kBF16, .rows = 1, .cols = 1040}, Fill::kNormal, 7);
  const TensorView weights =
      TensorView::contiguous(weight.row(0), DType::kBF16, {weight.shape().cols});
  using Layouts = std::pair<ScaleLayoutId, ScaleLayoutId>;
  constexpr auto kBands = ScaleLayoutId::kSwizzled128x4;
  for (const auto& [layout, second] :
       {Layouts{kBands, ScaleLayoutId::kLinear}, Layouts{ScaleLayoutId::kLinear, kBands},
        Layouts{ScaleLayoutId::kSwizzled8x4, kBands}, Layouts{kBands, kBands}}) {
    SCOPED_TRACE(::testing::Message() << name(layout) << " and " << name(second));
    expect_oracles_bytes("quantize", quantize_impls(), [&] {
      const QuantizedTensor output = empty_tensor(input, layout);
      const QuantizedTensor extra = empty_tensor(input, second);
      rmsnorm_quantize(input.view(), weights, output.view, {.extra_scales = extra.view.scales});
      return std::pair(bytes_of(output), extra.scales.copy());
    });
  }
}

TEST(SwizzledBands, FourOverSixAndSiluGiveTheOraclesBytes) {
  const Matrix input =
      Matrix::filled({.dtype = DType::kBF16, .rows = 130, .cols = 2080}, Fill::kNormal, 8);
  QuantizeTo to{.format = FormatId::kNvfp4, .layout = ScaleLayoutId::kSwizzled128x4, .options = {}};
  to.options.four_over_six.enabled = true;
  expect_oracles_bytes("quantize", quantize_impls(),
                       [&] { return bytes_of(quantized(input, to)); });
  const Matrix half({.dtype = DType::kBF16, .rows = 130, .cols = 1040});
  expect_oracles_bytes("quantize", quantize_impls(), [&] {
    const QuantizedTensor output = empty_tensor(half, ScaleLayoutId::kSwizzled128x4);
    silu_mul_quantize(input.view(), output.view);
    return bytes_of(output);
  });
}

}  // namespace
}  // namespace narrowfloat::testing
