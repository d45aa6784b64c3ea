// Inputs that are not plain matrices, and numbers on the device that the host cannot check: batches
// with strides of their own, group offsets that make no sense.
#include <fmt/format.h>

#include "cuda/gpu_test.h"
#include "cuda/host_comparison.h"
#include "support/device_copies.h"
#include "support/tensors.h"

namespace narrowfloat::testing {
namespace {

// [batch, rows, cols] of memory that is [rows, batch, cols].
TensorView transposed(const Matrix& memory, int64_t batch) {
  TensorView view = memory.view(3);
  view.shape = {batch, memory.shape().batch, memory.shape().cols};
  view.strides = {memory.stride(), memory.shape().rows * memory.stride(), 1};
  return view;
}

TEST_F(GpuTest, BatchesMayHaveAnyStrides) {
  constexpr int64_t kBatch = 3;
  constexpr int64_t kRows = 40;
  constexpr int64_t kCols = 384;
  const Matrix memory = Matrix::filled({.batch = kRows, .rows = kBatch, .cols = kCols, .gap = 16},
                                       Fill::kNormalRows, 1);
  const TensorView input = transposed(memory, kBatch);
  for (const QuantizeVariant& variant : default_variants()) {
    const QuantizedLayout layout = quantized_layout(
        variant.to.format, kRows, kCols, {.scale_layout = variant.to.layout, .batch = kBatch});
    const QuantizedTensor expected(layout);
    quantize(input, expected.view, variant.to.options);
    const QuantizedTensor actual(layout);
    const DeviceCopies device(
        {&memory.buffer(), &actual.values, &actual.scales, &actual.global_scale});
    quantize(device.view(input), device.view(actual.view), variant.to.options, device.stream());
    EXPECT_TRUE(device.take_back()) << variant.name;
    EXPECT_TRUE(bytes_of(expected) == bytes_of(actual)) << variant.name;
  }
}

// The result means nothing, but it stays inside the buffers.
TEST_F(GpuTest, SenselessGroupOffsetsStayInTheBuffers) {
  constexpr int64_t kRows = 300;
  constexpr int64_t kCols = 256;
  const Matrix input = Matrix::filled({.rows = kRows, .cols = kCols}, Fill::kNormal, 1);
  const Matrix output({.rows = kRows, .cols = kCols});
  Random random(2);
  for (int attempt = 0; attempt < 50; ++attempt) {
    std::vector<int64_t> offsets(static_cast<size_t>(random.range(2, 9)));
    for (int64_t& offset : offsets) {
      offset = attempt % 2 == 0 ? static_cast<int64_t>(random.bits()) : random.range(-400, 400);
    }
    const Vector on_host = Vector::of(DType::kI64, offsets);
    const auto groups = static_cast<int64_t>(offsets.size()) - 1;
    const QuantizedTensor coded(
        quantized_layout(FormatId::kFp8Block1x128, kRows, kCols, {.groups = groups}));
    const DeviceCopies device(
        {&input.buffer(), &on_host.buffer(), &coded.values, &coded.scales, &output.buffer()});
    const TensorView row_offsets = device.view(on_host.view());
    quantize(device.view(input.view()), device.view(coded.view), {.row_offsets = row_offsets},
             device.stream());
    dequantize(device.view(coded.view), device.view(output.view()), {.row_offsets = row_offsets},
               device.stream());
    EXPECT_TRUE(device.take_back()) << fmt::format("attempt {}", attempt);
  }
}

}  // namespace
}  // namespace narrowfloat::testing
