// Long chains of dependent operations: what one step writes the next one reads, at once. With
// programmatic launch the kernels overlap, and a step that touched memory too early would change
// what comes out a hundred steps later.
#include <algorithm>

#include <fmt/format.h>

#include "cuda/gpu_test.h"
#include "support/device_copies.h"
#include "support/tensors.h"

namespace narrowfloat::testing {
namespace {

constexpr int kSteps = 100;

// x = dequantize(quantize(rmsnorm(x + residual))), residual += x: never at rest.
class Chain {
 public:
  Chain(FormatId format, int64_t rows, int64_t cols)
      : x_(Matrix::filled({.rows = rows, .cols = cols}, Fill::kNormal, 1)),
        residual_(Matrix::filled({.rows = rows, .cols = cols}, Fill::kNormalRows, 2)),
        weight_(DType::kBF16, cols),
        coded_(quantized_layout(format, rows, cols)) {
    Random random(3);
    fill_elements(Fill::kNormal, DType::kBF16, random, cols, weight_.buffer().data());
    start_ = contents();
  }

  // The bytes of all buffers after the chain.
  std::vector<std::vector<uint8_t>> run(bool programmatic_launch, bool in_graph) {
    restore();
    const CudaStream stream;
    const DeviceCopies device(buffers());
    const auto queue = [&] {
      for (int i = 0; i < kSteps; ++i) step(device, stream.get(programmatic_launch));
    };
    if (in_graph) {
      CapturedGraph(stream, queue).replay();
    } else {
      queue();
    }
    stream.synchronize();
    EXPECT_TRUE(device.take_back());
    return contents();
  }

 private:
  void step(const DeviceCopies& device, Stream stream) {
    const TensorView x = device.view(x_.view());
    add_rmsnorm_quantize(x, device.view(residual_.view()), device.view(weight_.view()),
                         device.view(coded_.view), {}, {}, stream);
    dequantize(device.view(coded_.view), x, {}, stream);
    quantize(x, device.view(coded_.view), {}, stream);
    dequantize(device.view(coded_.view), x, {}, stream);
  }

  [[nodiscard]] Buffers buffers() const {
    return {&x_.buffer(),   &residual_.buffer(), &weight_.buffer(),
            &coded_.values, &coded_.scales,      &coded_.global_scale};
  }
  [[nodiscard]] std::vector<std::vector<uint8_t>> contents() const {
    std::vector<std::vector<uint8_t>> all;
    for (const GuardedBuffer* buffer : buffers()) all.push_back(buffer->copy());
    return all;
  }
  void restore() const {
    const Buffers all = buffers();
    for (size_t i = 0; i < all.size(); ++i) std::ranges::copy(start_[i], all[i]->data());
  }

  Matrix x_;
  Matrix residual_;
  Vector weight_;
  QuantizedTensor coded_;
  std::vector<std::vector<uint8_t>> start_;
};

TEST_F(GpuTest, ChainsGiveTheSameBytesWithProgrammaticLaunch) {
  for (const FormatInfo& info : all_formats()) {
    for (const auto& [rows, cols] : {std::pair{1, 2048}, {17, 512}, {300, 2048}}) {
      Chain chain(info.id, rows, cols);
      const auto expected = chain.run(false, false);
      for (int attempt = 0; attempt < 3; ++attempt) {
        const std::string note = fmt::format("{} {}x{}", info.name, rows, cols);
        EXPECT_TRUE(expected == chain.run(true, false)) << note;
        EXPECT_TRUE(expected == chain.run(true, true)) << note << " in a graph";
        EXPECT_TRUE(expected == chain.run(false, true)) << note << " in a plain graph";
        if (HasFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace narrowfloat::testing
