// Tensors without rows, columns or batches on a GPU: as on the host, and inside a capture.
#include <fmt/format.h>

#include "cuda/gpu_test.h"
#include "support/device_copies.h"
#include "support/tensors.h"

namespace narrowfloat::testing {
namespace {

struct Empty {
  int64_t batch;
  int64_t rows;
  int64_t cols;
};

QuantizedTensor empty_tensor(FormatId format, ScaleLayoutId layout, const Empty& shape) {
  return QuantizedTensor(quantized_layout(format, shape.rows, shape.cols,
                                          {.scale_layout = layout, .batch = shape.batch}));
}

void expect_host_bytes(FormatId format, ScaleLayoutId layout, const Empty& shape) {
  const Matrix input({.batch = shape.batch, .rows = shape.rows, .cols = shape.cols});
  const QuantizedTensor expected = empty_tensor(format, layout, shape);
  quantize(input.view(3), expected.view);
  const QuantizedTensor actual = empty_tensor(format, layout, shape);
  const QuantizedTensor copied = empty_tensor(format, layout, shape);
  const DeviceCopies device(
      {&input.buffer(), &actual.values, &actual.scales, &actual.global_scale, &copied.scales});
  const CudaStream stream;
  const CapturedGraph graph(stream, [&] {
    quantize(device.view(input.view(3)), device.view(actual.view), {}, stream.get());
    dequantize(device.view(actual.view), device.view(input.view(3)), {}, stream.get());
    relayout(format, device.view(actual.view.scales), device.view(copied.view.scales),
             stream.get());
  });
  graph.replay();
  EXPECT_TRUE(device.take_back());
  EXPECT_TRUE(bytes_of(expected) == bytes_of(actual));
  EXPECT_EQ(expected.scales.copy(), copied.scales.copy());
}

TEST_F(GpuTest, EmptyTensorsAreTheHosts) {
  for (const FormatInfo& info : all_formats()) {
    for (int layout = 0; layout < 4; ++layout) {
      const auto id = static_cast<ScaleLayoutId>(layout);
      if (!info.allows(id)) continue;
      for (const Empty& shape :
           {Empty{1, 0, 256}, Empty{1, 5, 0}, Empty{0, 5, 256}, Empty{1, 0, 0}}) {
        SCOPED_TRACE(fmt::format("{} {} {}x{}x{}", info.name, name(id), shape.batch, shape.rows,
                                 shape.cols));
        expect_host_bytes(info.id, id, shape);
      }
    }
  }
}

TEST_F(GpuTest, MaximaOfEmptyTensorsAreZero) {
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{0, 64}, {4, 0}}) {
    const Matrix input({.rows = rows, .cols = cols});
    const Vector all(DType::kF32, 1);
    const Vector each(DType::kF32, rows);
    const DeviceCopies device({&input.buffer(), &all.buffer(), &each.buffer()});
    tensor_amax(device.view(input.view()), device.view(all.view()), device.stream());
    row_amax(device.view(input.view()), device.view(each.view()), device.stream());
    EXPECT_TRUE(device.take_back());
    EXPECT_EQ(all.buffer().data<float>()[0], 0.0F);
    for (const float maximum : each.buffer().span<float>()) EXPECT_EQ(maximum, 0.0F);
  }
}

}  // namespace
}  // namespace narrowfloat::testing
