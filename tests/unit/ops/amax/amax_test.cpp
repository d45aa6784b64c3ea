// The promises of tensor_amax and row_amax beyond equality with a plain loop: independence of
// threads and of the caller's floating-point mode, empty tensors, and every check of the arguments.
#include <limits>

#include <gtest/gtest.h>

#include "support/environment.h"
#include "support/expect_error.h"
#include "support/tensors.h"

namespace narrowfloat::testing {
namespace {

float amax_of(const Matrix& input) {
  const Vector output(DType::kF32, 1);
  tensor_amax(input.view(), output.view());
  return output.buffer().data<float>()[0];
}

TEST(Amax, CountsDenormalsWhateverTheCallersMode) {
  const Matrix input({.dtype = DType::kF32, .rows = 300, .cols = 700}, {.poison = 0});
  input.set(299, 699, -0x1p-149F);
  for (const unsigned control : {0U, kFlushToZero | kDenormalsAreZero, kRoundUp}) {
    const ControlWord word(control);
    const Vector output(DType::kF32, 1);
    tensor_amax(input.view(), output.view());
    EXPECT_EQ(output.buffer().span<uint32_t>()[0], 1U);
  }
  for (const int threads : {1, 2, 3, 8}) {
    const ThreadLimit limit(threads);
    EXPECT_EQ(amax_of(input), 0x1p-149F);
  }
}

TEST(Amax, IsZeroForNoNumbersAndInfiniteForInfinities) {
  Matrix input = Matrix::filled({.dtype = DType::kBF16, .rows = 2, .cols = 5}, Fill::kZeros, 1);
  for (int64_t col = 0; col < 5; ++col) {
    input.set(0, col, std::numeric_limits<float>::quiet_NaN());
    input.set(1, col, std::numeric_limits<float>::quiet_NaN());
  }
  EXPECT_EQ(amax_of(input), 0.0F);
  input.set(1, 2, -std::numeric_limits<float>::infinity());
  EXPECT_EQ(amax_of(input), std::numeric_limits<float>::infinity());
}

TEST(Amax, AcceptsEmptyTensors) {
  const Vector one(DType::kF32, 1);
  tensor_amax(TensorView::contiguous(nullptr, DType::kF32, {0, 7}), one.view());
  EXPECT_EQ(one.buffer().data<float>()[0], 0.0F);
  row_amax(TensorView::contiguous(nullptr, DType::kF32, {0, 7}),
           TensorView::contiguous(nullptr, DType::kF32, {0}));
  const Vector three(DType::kF32, 3);
  row_amax(TensorView::contiguous(nullptr, DType::kF32, {3, 0}), three.view());
  EXPECT_EQ(three.buffer().copy(), std::vector<uint8_t>(12, 0));
}

TEST(Amax, ChecksItsArguments) {
  const Matrix input =
      Matrix::filled({.dtype = DType::kBF16, .rows = 4, .cols = 6}, Fill::kNormal, 1);
  const Vector output(DType::kF32, 4);
  const auto expect_refused = [&](const TensorView& from, const TensorView& to,
                                  const std::vector<std::string>& fragments) {
    expect_error(ErrorKind::kInvalidArgument, fragments, [&] { row_amax(from, to); });
    EXPECT_EQ(output.buffer().copy(), std::vector<uint8_t>(16, 0xCC));
  };
  TensorView from = input.view();
  from.dtype = DType::kF8E4M3;
  expect_refused(from, output.view(), {"input", "F32 or F16 or BF16", "F8_E4M3"});
  from = input.view();
  from.data = nullptr;
  expect_refused(from, output.view(), {"input", "null"});
  from = input.view();
  from.strides[1] = 2;
  expect_refused(from, output.view(), {"input", "stride 1", "2"});
  from = input.view();
  from.strides[0] = 5;
  expect_refused(from, output.view(), {"input", "at least 6", "5"});
  from = input.view();
  from.rank = 0;
  expect_refused(from, output.view(), {"input", "axis"});
  TensorView to = output.view();
  to.shape[0] = 3;
  expect_refused(input.view(), to, {"output", "4 values", "F32[3]"});
  to = output.view();
  to.dtype = DType::kBF16;
  expect_refused(input.view(), to, {"output", "F32", "BF16"});
  to = output.view();
  to.device.type = DeviceType::kCuda;
  expect_refused(input.view(), to, {"output", "cpu", "cuda:0"});
  expect_error(ErrorKind::kInvalidArgument, {"output", "1 values", "F32[4]"},
               [&] { tensor_amax(input.view(), output.view()); });
}

TEST(Amax, RefusesDevicesItCannotDoWithEveryCandidatesReason) {
  if (build_has_cuda()) GTEST_SKIP() << "this build has implementations for CUDA";
  const Matrix input({.dtype = DType::kBF16, .rows = 4, .cols = 6});
  const Vector output(DType::kF32, 4);
  TensorView from = input.view();
  TensorView to = output.view();
  from.device.type = to.device.type = DeviceType::kCuda;
  expect_error(ErrorKind::kUnsupported,
               {"amax", "cuda:0", "cpu_baseline", "cpu_reference", "runs on the CPU only"},
               [&] { row_amax(from, to); });
}

}  // namespace
}  // namespace narrowfloat::testing
