// See gemm_device_run.h.
#include "support/gemm_device_run.h"

#include <algorithm>
#include <cmath>

#include <gtest/gtest.h>

#include "base/int_math.h"
#include "tensor/view_checks.h"

namespace narrowfloat::testing {
namespace {

constexpr uint8_t kUnwritten = 0xFF;

WeightView weights_on_device(const WeightView& host, const DeviceBuffer& values,
                             const DeviceBuffer& scales) {
  WeightView view = host;
  view.values.data = values.data();
  view.values.device = gpu();
  if (view.scales.data == nullptr) return view;
  view.scales.data = scales.data();
  view.scales.device = gpu();
  return view;
}

bool is_written(const std::vector<uint8_t>& output, size_t element, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) {
    if (output[element * bytes + i] != 0xFF) return true;
  }
  return false;
}

}  // namespace

GemmTolerance gemm_tolerance(const GemmCaseSpec& spec) {
  switch (spec.mode) {
    case MoeMode::kFp8Tensor:
    case MoeMode::kFp8Block:
    case MoeMode::kMxfp4Fp8:
    case MoeMode::kNvfp4Fp8Rounded:
      return {.of_terms = 1e-3, .of_norm = 1.5e-3};
    case MoeMode::kMxfp4Fp8Token:
    case MoeMode::kNvfp4Fp8Token:
      // No sums are promoted every 128 columns (moe spec 11.4): what a step truncates grows with
      // the sum of all columns before.
      return {.of_terms = 1e-3 * static_cast<double>(ceil_div(spec.cols, int64_t{128})),
              .of_norm = 1.5e-3};
    default:
      return {};
  }
}

GemmOnDevice::GemmOnDevice(const GemmCase& gemm, DType output, ScaleLayoutId layout) {
  const WeightView host = gemm.weights(layout);
  const ByteRange values = byte_range("values", host.values);
  const ByteRange scales = byte_range("scales", host.scales);
  {
    // Gone once prepare() has returned: the packed weights are a copy.
    const DeviceBuffer value_copy(values.size_bytes, {.guard_after = false});
    value_copy.write(values.data, values.size_bytes);
    const DeviceBuffer scale_copy(std::max<int64_t>(1, scales.size_bytes), {.guard_after = false});
    if (scales.size_bytes > 0) scale_copy.write(scales.data, scales.size_bytes);
    weights_ = GroupedWeights::prepare(
        weights_on_device(host, value_copy, scale_copy), gemm.spec().mode, gpu(), stream_.get(),
        gemm.spec().knows_halves ? gemm.spec().gate_order : std::nullopt);
    value_copy.fill(0xA5);
  }
  args = gemm.args();
  for (TensorView* view :
       {&args.a.values, &args.a.scales, &args.a.row_scale, &args.permutation.row_to_token,
        &args.permutation.row_to_slot, &args.permutation.tile_to_expert,
        &args.permutation.tile_row_end, &args.permutation.num_tiles, &args.slot_weights,
        &args.scale.values, &args.gate_scale.values, &args.bias}) {
    *view = copy(*view);
  }
  const int64_t rows = gemm.max_rows();
  const int64_t cols = gemm.spec().weight_rows;
  output_ = DeviceBuffer(rows * cols * bits(output) / 8, {.poison = kUnwritten});
  args.output = TensorView::contiguous(output_.data(), output, {rows, cols});
  args.output.device = gpu();
  const int64_t size = grouped_gemm_workspace(weights_, gemm.input_rows(), Accumulation::kFp32);
  workspace_ = DeviceBuffer(size, {.poison = kUnwritten});
}

void* GemmOnDevice::copy_bytes(const void* host, int64_t size) {
  buffers_.push_back(std::make_unique<DeviceBuffer>(size, DeviceBufferStyle{.guard_after = false}));
  buffers_.back()->write(host, size);
  return buffers_.back()->data();
}

TensorView GemmOnDevice::copy(const TensorView& host) {
  TensorView device = host;
  if (host.is_absent()) return device;
  const ByteRange range = byte_range("tensor", host);
  device.device = gpu();
  device.data = range.size_bytes == 0 ? nullptr : copy_bytes(range.data, range.size_bytes);
  return device;
}

void GemmOnDevice::call(Stream stream) const {
  TensorView workspace = TensorView::contiguous(workspace_.data(), DType::kU8, {workspace_.size()});
  workspace.device = gpu();
  grouped_gemm(args, weights_, workspace, layer, stream);
}

std::vector<uint8_t> GemmOnDevice::take_output() const {
  stream_.synchronize();
  EXPECT_TRUE(output_.intact() && workspace_.intact());
  return output_.copy();
}

std::vector<uint8_t> GemmOnDevice::run(bool programmatic_launch) const {
  output_.fill(kUnwritten);
  workspace_.fill(kUnwritten);
  call(stream_.get(programmatic_launch));
  return take_output();
}

std::vector<uint8_t> GemmOnDevice::replay() const {
  output_.fill(kUnwritten);
  const CapturedGraph graph(stream_, [&] {
    call(stream_.get(true));
    call(stream_.get(true));
  });
  graph.replay(3);
  return take_output();
}

void expect_padding_untouched(const GemmCase& gemm, DType dtype,
                              const std::vector<uint8_t>& output) {
  std::vector<bool> is_valid(static_cast<size_t>(gemm.max_rows()));
  for (const GemmCase::Row& row : gemm.rows()) is_valid[static_cast<size_t>(row.row)] = true;
  const auto bytes = static_cast<size_t>(bits(dtype) / 8);
  const auto cols = static_cast<size_t>(gemm.spec().weight_rows);
  for (size_t row = 0; row < is_valid.size(); ++row) {
    if (is_valid[row]) continue;
    for (size_t col = 0; col < cols; ++col) {
      ASSERT_FALSE(is_written(output, row * cols + col, bytes)) << "row " << row << " col " << col;
    }
  }
}

void expect_near(const GemmCase& gemm, DType dtype, const std::vector<uint8_t>& output) {
  const GemmTolerance tolerance = gemm_tolerance(gemm.spec());
  double error = 0;
  double norm = 0;
  for (const GemmCase::Row& row : gemm.rows()) {
    for (int64_t col = 0; col < gemm.spec().weight_rows; ++col) {
      const auto [value, magnitude] = gemm.expected(row, col);
      const double got = output_element(dtype, output, row.row * gemm.spec().weight_rows + col);
      const double rounding = dtype == DType::kBF16 ? 0x1p-8 * std::abs(value) : 0;
      ASSERT_LE(std::abs(got - value), tolerance.of_terms * magnitude + rounding)
          << "row " << row.row << " col " << col << " got " << got << " expected " << value;
      error += (got - value) * (got - value);
      norm += value * value;
    }
  }
  if (dtype == DType::kF32) {
    EXPECT_LE(std::sqrt(error), tolerance.of_norm * std::sqrt(norm));
  }
}

void divide_tiles(const GemmCase& gemm, int32_t token_tile, GemmOnDevice& device) {
  const Permutation whole = gemm.args().permutation;
  std::vector<int32_t> experts;
  std::vector<int32_t> ends;
  for (int32_t first = 0; first < gemm.max_rows(); first += token_tile) {
    const int32_t tile = first / whole.token_tile;
    experts.push_back(static_cast<const int32_t*>(whole.tile_to_expert.data)[tile]);
    const int32_t end = static_cast<const int32_t*>(whole.tile_row_end.data)[tile];
    ends.push_back(std::min(end, first + token_tile));
  }
  const auto copy = [&](std::vector<int32_t>& values) {
    const auto count = static_cast<int64_t>(values.size());
    return device.copy(TensorView::contiguous(values.data(), DType::kI32, {count}));
  };
  std::vector<int32_t> count{static_cast<int32_t>(experts.size())};
  Permutation& permutation = device.args.permutation;
  permutation.token_tile = token_tile;
  permutation.tile_to_expert = copy(experts);
  permutation.tile_row_end = copy(ends);
  permutation.num_tiles = copy(count);
}

}  // namespace narrowfloat::testing
