// dequantize() on a GPU where conformance does not reach: tensors large enough for several rows a
// thread, every code with every scale byte, more than 2^31 elements, broken row offsets.
#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/host_device.h"
#include "cuda/gpu_test.h"
#include "cuda/random_bytes.h"
#include "narrowfloat/quantize.h"
#include "support/device_buffer.h"
#include "support/device_copies.h"
#include "support/tensors.h"

namespace narrowfloat::testing {
namespace {

class DequantizeCuda : public GpuTest {};

struct Run {
  DType dtype = DType::kF32;
  int64_t gap = 0;
  DequantizeOptions options;
  Vector offsets;
  bool programmatic_launch = false;
};

// The GPU's elements; the CPU's are compared with them, gaps between rows with their poison.
void expect_equal_on_gpu(const QuantizedTensor& input, const Run& run, const std::string& what) {
  const QuantizedView& view = input.view;
  const MatrixShape shape{.dtype = run.dtype,
                          .batch = view.batch,
                          .rows = view.rows,
                          .cols = view.cols,
                          .gap = run.gap};
  const Matrix expected(shape);
  const Matrix actual(shape);
  DequantizeOptions options = run.options;
  if (run.offsets.buffer().size() > 0) options.row_offsets = run.offsets.view();
  dequantize(view, expected.view(3), options);
  const DeviceCopies copies(
      {&input.values, &input.scales, &input.global_scale, &actual.buffer(), &run.offsets.buffer()},
      {.programmatic_launch = run.programmatic_launch});
  options.row_offsets = copies.view(options.row_offsets);
  dequantize(copies.view(view), copies.view(actual.view(3)), options, copies.stream());
  ASSERT_TRUE(copies.take_back()) << what << ": a canary was overwritten";
  const auto bytes = [](const Matrix& matrix) { return matrix.buffer().span(); };
  if (std::ranges::equal(bytes(expected), bytes(actual))) return;
  const auto [at, other] = std::ranges::mismatch(bytes(expected), bytes(actual));
  const int64_t element = (at - bytes(expected).begin()) / (bits(run.dtype) / 8);
  ADD_FAILURE() << what << ": row " << element / expected.stride() << ", col "
                << element % expected.stride();
}

// Every scale byte a row; every code in every block.
QuantizedTensor all_codes(FormatId format) {
  const bool is_packed = format_info(format).element_bits == 4;
  QuantizedTensor tensor(
      quantized_layout(format, 256, 512, {.scale_layout = ScaleLayoutId::kLinear}));
  const int64_t row_bytes = tensor.values.size() / 256;
  for (int64_t i = 0; i < tensor.values.size(); ++i) {
    const int64_t col = i % row_bytes;
    tensor.values.data()[i] =
        static_cast<uint8_t>(is_packed ? (2 * col) % 16 | (2 * col + 1) % 16 << 4 : col);
  }
  for (int64_t row = 0; row < 256; ++row) {
    std::memset(tensor.scales.data() + row * tensor.layout.scale_blocks, static_cast<int>(row),
                static_cast<size_t>(tensor.layout.scale_blocks));
  }
  return tensor;
}

constexpr std::array kOutputs{DType::kF32, DType::kF16, DType::kBF16};

TEST_F(DequantizeCuda, EveryCodeWithEveryScaleByte) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const DType dtype : kOutputs) {
    expect_equal_on_gpu(all_codes(FormatId::kMxfp4), {.dtype = dtype}, "mxfp4");
    expect_equal_on_gpu(all_codes(FormatId::kMxfp8), {.dtype = dtype}, "mxfp8");
    const QuantizedTensor nvfp4 = all_codes(FormatId::kNvfp4);
    for (const float global : {1.0F, 1.0F / 3.0F, 0x1.8p-149F * 8, 0x1.23456p-127F, 0x1p-126F,
                               0x1.fffffep119F, 1e30F, 0x1.fffffep127F, kInfinity, -0.0F, 0.0F,
                               -7.0F, bits_float(0xFFC12345U), bits_float(0x7F800001U)}) {
      nvfp4.global_scale.data<float>()[0] = global;
      for (const bool divides : {false, true}) {
        expect_equal_on_gpu(nvfp4, {.dtype = dtype, .options = {.global_scale_divides = divides}},
                            fmt::format("nvfp4 {}{}", divides ? "/ " : "* ", global));
      }
    }
  }
}

TEST_F(DequantizeCuda, EveryE4m3CodeWithF32ScalesOfAllExponents) {
  QuantizedTensor tensor(quantized_layout(FormatId::kFp8Block1x128, 4096, 256));
  for (int64_t i = 0; i < tensor.values.size(); ++i) {
    tensor.values.data()[i] = static_cast<uint8_t>(i);
  }
  Random random(3);
  uint32_t exponent = 0;
  for (uint32_t& scale : tensor.scales.span<uint32_t>()) {
    scale = (random.bits32() & 0x807FFFFFU) | (exponent++ & 0xFFU) << 23;
    if (random.chance(5)) scale &= 0xFF800000U;
  }
  for (const DType dtype : kOutputs) expect_equal_on_gpu(tensor, {.dtype = dtype}, "fp8_1x128");
}

using Combination = std::pair<FormatId, ScaleLayoutId>;

std::vector<Combination> all_combinations() {
  std::vector<Combination> all;
  for (const FormatInfo& info : all_formats()) {
    for (size_t layout = 0; layout < info.layouts.size(); ++layout) {
      if (info.layouts[layout]) all.emplace_back(info.id, static_cast<ScaleLayoutId>(layout));
    }
  }
  return all;
}

std::string test_name(const Combination& combination) {
  return fmt::format("{}_{}", name(combination.first), name(combination.second));
}

struct Extents {
  int64_t batch;
  int64_t rows;
  int64_t cols;
};

// Above the size where a thread takes four rows, and odd: neither rows nor tiles are whole.
Extents large_extents(Random& random) {
  constexpr int64_t kElements = 2500000;
  const int64_t batch = random.chance(30) ? random.range(2, 5) : 1;
  const int64_t cols = random.pick<int64_t>({32, 288, 1536, 2048, 2880, 4096, 7168, 16384});
  const int64_t rows = kElements / (batch * cols) + 1;
  return {batch, rows + random.range(0, 130), cols};
}

int64_t num_global_scales(const FormatInfo& info, const Extents& extents, Random& random) {
  if (info.has_row_scale) return extents.batch * extents.rows;
  return random.pick<int64_t>({1, extents.rows, extents.batch});
}

std::vector<int64_t> random_offsets(int64_t rows, Random& random) {
  std::vector<int64_t> offsets{0, rows};
  for (int64_t i = random.range(0, 300); i > 0; --i) offsets.push_back(random.range(0, rows));
  std::ranges::sort(offsets);
  return offsets;
}

void fill_random(const QuantizedTensor& tensor, uint64_t seed) {
  random_bytes(tensor.values.span(), seed);
  random_bytes(tensor.scales.span(), seed + 1);
  Random random(seed + 2);
  for (float& scale : tensor.global_scale.span<float>()) scale = random.normal();
}

void run_large_case(const Combination& combination, uint64_t seed) {
  const auto [format, layout] = combination;
  const FormatInfo& info = format_info(format);
  Random random(seed);
  Extents extents = large_extents(random);
  Run run{.dtype = kOutputs[static_cast<size_t>(random.range(0, 2))],
          .gap = random.chance(30) ? 8 * random.range(1, 9) : 0,
          .options = {.global_scale_divides = info.has_global_scale && random.chance(20)},
          .offsets = {},
          .programmatic_launch = random.chance(50)};
  QuantizedLayoutOptions options{
      .scale_layout = layout,
      .batch = extents.batch,
      .alignment = format == FormatId::kMxfp8 && random.chance(50) ? 128 : 32};
  if (format == FormatId::kFp8Block1x128 && layout == ScaleLayoutId::kMnMajor &&
      random.chance(60)) {
    options.batch = 1;
    extents.rows *= extents.batch;
    run.offsets = Vector::of(DType::kI64, random_offsets(extents.rows, random));
    options.groups = run.offsets.buffer().size() / 8 - 1;
  }
  const QuantizedTensor input(
      quantized_layout(format, extents.rows, extents.cols, options), {},
      info.has_global_scale ? num_global_scales(info, extents, random) : std::optional<int64_t>());
  fill_random(input, seed);
  expect_equal_on_gpu(
      input, run,
      fmt::format("seed {}: {} {}x{}x{} -> {} gap {}", seed, test_name(combination), options.batch,
                  extents.rows, extents.cols, name(run.dtype), run.gap));
}

class LargeDequantizeCuda : public DequantizeCuda,
                            public ::testing::WithParamInterface<Combination> {};

TEST_P(LargeDequantizeCuda, EqualsTheCpu) {
  constexpr uint64_t kCases = 16;
  for (uint64_t seed = 0; seed < kCases && !HasFailure(); ++seed) {
    run_large_case(GetParam(), seed * 1000 + static_cast<uint64_t>(GetParam().first));
  }
}

INSTANTIATE_TEST_SUITE_P(All, LargeDequantizeCuda, ::testing::ValuesIn(all_combinations()),
                         [](const auto& test) { return test_name(test.param); });

// Nobody can check offsets that live on the device: whatever is there, nothing outside the tensors
// is touched.
TEST_F(DequantizeCuda, BrokenRowOffsetsReadNothingOutsideTheScales) {
  for (const int64_t rows : {100, 3000}) {
    constexpr int64_t kGroups = 6;
    constexpr int64_t kCols = 1024;
    const QuantizedTensor input(
        quantized_layout(FormatId::kFp8Block1x128, rows, kCols, {.groups = kGroups}));
    fill_random(input, 1);
    Random random(5);
    for (int trial = 0; trial < 50; ++trial) {
      std::vector<int64_t> values(kGroups + 1);
      for (int64_t& value : values) {
        value = random.pick<int64_t>({static_cast<int64_t>(random.bits()), INT64_MIN, INT64_MAX, -1,
                                      random.range(-100, 2 * rows)});
      }
      const Vector offsets = Vector::of(DType::kI64, values);
      const Matrix output({.dtype = DType::kBF16, .rows = rows, .cols = kCols});
      const DeviceCopies copies(
          {&input.values, &input.scales, &output.buffer(), &offsets.buffer()});
      const DequantizeOptions options{.row_offsets = copies.view(offsets.view())};
      dequantize(copies.view(input.view), copies.view(output.view()), options, copies.stream());
      ASSERT_TRUE(copies.take_back());
    }
  }
}

// Rows [first, first + count) of a tensor whose scales are linear or in tiles of 128 rows.
QuantizedView window(const QuantizedView& tensor, int64_t first, int64_t count) {
  QuantizedView part = tensor;
  part.rows = part.values.shape[1] = part.scales.rows = count;
  const int64_t row_bytes = tensor.values.shape[2];
  part.values.data = static_cast<uint8_t*>(tensor.values.data) + first * row_bytes;
  part.scales.data = static_cast<uint8_t*>(tensor.scales.data) +
                     scale_image_size(tensor.scales.layout, first, tensor.scales.blocks);
  part.scales.capacity = scale_image_size(tensor.scales.layout, count, tensor.scales.blocks);
  return part;
}

// The first rows, those around element 2^31 and around byte 2^32, and the last.
TEST_F(DequantizeCuda, MoreThanTwoToThe31Elements) {
  constexpr int64_t kCols = 7168;
  constexpr int64_t kRows = (int64_t{1} << 31) / kCols + 1000;
  constexpr int64_t kWindow = 256;
  constexpr int64_t kRowBytes = kCols * 2;
  if (free_device_memory() < int64_t{7} << 30) GTEST_SKIP() << "skipped: needs 7 GiB of memory";
  for (const ScaleLayoutId layout : {ScaleLayoutId::kLinear, ScaleLayoutId::kSwizzled128x4}) {
    const QuantizedTensor input(
        quantized_layout(FormatId::kNvfp4, kRows, kCols, {.scale_layout = layout}));
    fill_random(input, 7);
    const DeviceBuffer output(kRows * kRowBytes);
    const DeviceCopies copies({&input.values, &input.scales, &input.global_scale});
    dequantize(copies.view(input.view),
               TensorView::contiguous(output.data(), DType::kBF16, {kRows, kCols}, gpu()));
    for (const int64_t wanted :
         {int64_t{0}, (int64_t{1} << 30) / kCols, (int64_t{1} << 31) / kCols - 100, kRows - 200}) {
      const int64_t first = wanted / 128 * 128;
      const int64_t count = std::min(kWindow, kRows - first);
      const Matrix expected({.dtype = DType::kBF16, .rows = count, .cols = kCols});
      dequantize(window(input.view, first, count), expected.view());
      std::vector<uint8_t> actual(static_cast<size_t>(count * kRowBytes));
      output.read(actual.data(), count * kRowBytes, first * kRowBytes);
      EXPECT_EQ(expected.elements(), actual) << name(layout) << " from row " << first;
    }
    EXPECT_TRUE(output.intact());
  }
}

}  // namespace
}  // namespace narrowfloat::testing
