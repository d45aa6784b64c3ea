// The calls that are refused on a GPU, their messages, and that nothing was touched. The checks run
// before any launch, so these tests need no GPU; the views lie about where their host memory is.
#include <functional>

#include "cuda/gpu_test.h"
#include "ops/quantize/sm90/quantize_rows.h"
#include "runtime/cuda/cuda_devices.h"
#include "support/expect_error.h"
#include "support/tensors.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kCallRows = 6;
constexpr int64_t kCallCols = 128;

// All operands of all operations, valid on the device.
struct Operands {
  // Host memory, in which tests look for writes.
  Matrix input_memory{{.rows = kCallRows, .cols = kCallCols, .gap = 8}};
  Matrix residual_memory{{.rows = kCallRows, .cols = kCallCols, .gap = 8}};
  Matrix norm_memory{{.rows = kCallRows + 1, .cols = kCallCols}};
  Vector vector_memory{DType::kBF16, kCallCols + 8};
  QuantizedTensor coded_memory{quantized_layout(FormatId::kNvfp4, kCallRows + 1, kCallCols)};
  QuantizedTensor extra_memory{quantized_layout(FormatId::kNvfp4, kCallRows + 1, kCallCols)};
  Matrix output_memory{{.dtype = DType::kF32, .rows = kCallRows, .cols = kCallCols, .gap = 4}};

  TensorView input;
  TensorView residual;
  TensorView vector;
  QuantizedView coded;
  RmsNormOptions norm;
  ScaleView other_scales;
  TensorView output;
  QuantizeOptions options;

  explicit Operands(Device device) {
    const auto layout = quantized_layout(FormatId::kNvfp4, kCallRows, kCallCols);
    input = moved(input_memory.view(), device);
    residual = moved(residual_memory.view(), device);
    vector = moved(vector_memory.view(), device);
    vector.shape[0] = kCallCols;
    coded = layout.bind(coded_memory.values.data(), coded_memory.scales.data(),
                        coded_memory.global_scale.data<float>(), device);
    const QuantizedView extra =
        layout.bind(coded_memory.values.data(), extra_memory.scales.data(), nullptr, device);
    norm.extra_scales = extra.scales;
    other_scales = extra.scales;
    norm.norm_output = moved(norm_memory.view(), device);
    norm.norm_output.shape[0] = kCallRows;
    output = moved(output_memory.view(), device);
    options.encode_scale = 1.0F;
  }

  static TensorView moved(TensorView view, Device device) {
    view.device = device;
    return view;
  }

  [[nodiscard]] std::vector<std::vector<uint8_t>> contents() const {
    return {residual_memory.buffer().copy(),  norm_memory.buffer().copy(),
            coded_memory.values.copy(),       coded_memory.scales.copy(),
            coded_memory.global_scale.copy(), extra_memory.scales.copy(),
            output_memory.buffer().copy()};
  }
};

using Change = std::function<void(Operands&)>;
using Call = std::function<void(const Operands&)>;

void call_quantize(const Operands& o) { quantize(o.input, o.coded, o.options); }
void call_silu_mul(const Operands& o) { silu_mul_quantize(o.input, o.coded, o.options); }
void call_smooth(const Operands& o) { smooth_quantize(o.input, o.vector, o.coded, o.options); }
void call_add_rmsnorm(const Operands& o) {
  add_rmsnorm_quantize(o.input, o.residual, o.vector, o.coded, o.norm, o.options);
}
void call_dequantize(const Operands& o) { dequantize(o.coded, o.output); }
void call_relayout(const Operands& o) {
  relayout(FormatId::kNvfp4, o.coded.scales, o.other_scales);
}

void expect_refusal(const Call& call, const Change& change, const std::vector<std::string>& words) {
  Operands operands(gpu());
  change(operands);
  const auto before = operands.contents();
  expect_error(ErrorKind::kInvalidArgument, words, [&] { call(operands); });
  EXPECT_TRUE(before == operands.contents()) << words.front();
}

// 8 bytes further: aligned to every element type.
void shift(void*& data) { data = static_cast<uint8_t*>(data) + 8; }

TEST(GpuChecks, MisalignedBuffersAreNamed) {
  const auto expect = [](const Call& call, const std::string& argument, const Change& change) {
    expect_refusal(call, change,
                   {argument + ": expected an address aligned to 16 bytes on cuda:0"});
  };
  expect(call_quantize, "input", [](Operands& o) { shift(o.input.data); });
  expect(call_quantize, "output.values", [](Operands& o) { shift(o.coded.values.data); });
  expect(call_quantize, "output.scales", [](Operands& o) { shift(o.coded.scales.data); });
  expect(call_smooth, "smooth", [](Operands& o) { shift(o.vector.data); });
  expect(call_add_rmsnorm, "weight", [](Operands& o) { shift(o.vector.data); });
  expect(call_add_rmsnorm, "residual", [](Operands& o) { shift(o.residual.data); });
  expect(call_add_rmsnorm, "norm.norm_output", [](Operands& o) { shift(o.norm.norm_output.data); });
  expect(call_add_rmsnorm, "norm.extra_scales",
         [](Operands& o) { shift(o.norm.extra_scales.data); });
  expect(call_dequantize, "input.values", [](Operands& o) { shift(o.coded.values.data); });
  expect(call_dequantize, "input.scales", [](Operands& o) { shift(o.coded.scales.data); });
  expect(call_dequantize, "output", [](Operands& o) { shift(o.output.data); });
  expect(call_relayout, "input", [](Operands& o) { shift(o.coded.scales.data); });
  expect(call_relayout, "output", [](Operands& o) { shift(o.other_scales.data); });
}

TEST(GpuChecks, MisalignedRowsAreNamed) {
  const auto expect = [](const Call& call, const std::string& argument, const Change& change) {
    expect_refusal(call, change,
                   {argument + ": expected rows a multiple of 16 bytes apart on cuda:0"});
  };
  expect(call_quantize, "input", [](Operands& o) { o.input.strides[0] -= 4; });
  expect(call_add_rmsnorm, "residual", [](Operands& o) { o.residual.strides[0] -= 4; });
  expect(call_dequantize, "output", [](Operands& o) { o.output.strides[0] -= 2; });
}

// Everything that is wrong on every device is told with the same words.
TEST(GpuChecks, OtherMistakesReadAsOnTheHost) {
  const auto message = [](const Call& call, const Change& change, Device device) -> std::string {
    Operands operands(device);
    change(operands);
    try {
      call(operands);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  const std::vector<std::pair<Call, Change>> mistakes{
      {call_quantize, [](Operands& o) { o.input.dtype = DType::kF64; }},
      {call_quantize, [](Operands& o) { o.input.shape[1] = 64; }},
      {call_quantize, [](Operands& o) { o.input.strides[1] = 2; }},
      {call_quantize, [](Operands& o) { o.coded.scales.capacity -= 1; }},
      {call_quantize, [](Operands& o) { o.coded.scales.type = ScaleType::kUE8M0; }},
      {call_quantize, [](Operands& o) { o.coded.global_scale.data = nullptr; }},
      {call_quantize, [](Operands& o) { o.coded.values.data = o.input.data; }},
      {call_quantize, [](Operands& o) { o.options.encode_scale = 0.0F; }},
      {call_quantize, [](Operands& o) { o.options.fp8_eps = 1.0F; }},
      {call_silu_mul, [](Operands&) {}},
      {call_smooth, [](Operands& o) { o.vector.shape[0] = 64; }},
      {call_add_rmsnorm, [](Operands& o) { o.norm.eps = -1.0F; }},
      {call_dequantize, [](Operands& o) { o.output.dtype = DType::kI32; }},
      {call_dequantize, [](Operands& o) { o.coded.global_scale.shape[0] = 2; }},
      {call_relayout, [](Operands& o) { o.other_scales.rows += 1; }},
  };
  for (const auto& [call, change] : mistakes) {
    const std::string on_host = message(call, change, {});
    EXPECT_NE(on_host, "accepted");
    EXPECT_EQ(on_host, message(call, change, gpu()));
  }
}

TEST(GpuChecks, TensorsOnTwoDevicesAreRefused) {
  expect_refusal(call_quantize, [](Operands& o) { o.coded.global_scale.device = {}; },
                 {"output.global_scale: expected device cuda:0", "got cpu"});
  expect_refusal(call_dequantize, [](Operands& o) { o.output.device = gpu(1); },
                 {"output: expected device cuda:0", "got cuda:1"});
}

TEST(GpuChecks, AMissingDeviceIsNamed) {
  const Operands operands(gpu(63));
  for (const Call& call :
       {Call(call_quantize), Call(call_smooth), Call(call_dequantize), Call(call_relayout)}) {
    expect_error(ErrorKind::kUnsupported, {"there is no cuda:63", "runs on the CPU only"},
                 [&] { call(operands); });
  }
}

TEST(GpuChecks, AMachineWithoutDevicesSaysSo) {
  if (list_gpus().empty()) {
    expect_error(ErrorKind::kDevice, {"device: there are no CUDA devices, got cuda:0"},
                 [] { cuda_device(0); });
  } else {
    expect_error(ErrorKind::kDevice, {"device: expected cuda:0 to cuda:", "got cuda:-1"},
                 [] { cuda_device(-1); });
  }
}

TEST(GpuChecks, AFailureThatWasThrownIsNotLeftForTheCaller) {
  // Without a driver every question ends in an error.
  if (list_gpus().empty()) GTEST_SKIP() << "skipped: no CUDA device";
  expect_error(ErrorKind::kDevice, {"cuda"}, [] { const CudaDeviceScope scope(gpu(9999)); });
  EXPECT_FALSE(has_cuda_error());
}

// MXFP8 pads values to any multiple of 32, and a norm's threads walk over the padding.
TEST(GpuChecks, NormsOfRowsThatArePaddedTooFarAreRefused) {
  constexpr int64_t kMost = 524288;
  QuantizeProblem problem{.format = FormatId::kMxfp8,
                          .source = RowSourceKind::kRmsNorm,
                          .rows = 1,
                          .cols = 64,
                          .value_cols = kMost};
  EXPECT_TRUE(norm_extents(problem).ok());
  problem.value_cols = kMost + 32;
  EXPECT_EQ(norm_extents(problem).reason(), "norms take up to 524288 columns, padding included");
  problem.cols = kMost + 32;
  EXPECT_FALSE(norm_extents(problem).ok());
}

}  // namespace
}  // namespace narrowfloat::testing
