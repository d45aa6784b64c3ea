// Every implementation of dequantize, in every format and layout, against the oracle, on random
// codes and scales: all codes, NaN scales, bytes 0, 254 and 255, every axis of the global scale.
#include <cstring>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/host_device.h"
#include "conformance/case_sampling.h"
#include "conformance/coverage.h"
#include "narrowfloat/error.h"
#include "ops/dequantize/dequantize_problem.h"
#include "support/device_copies.h"
#include "support/environment.h"
#include "support/tensors.h"
#include "tensor/block_math.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kDequantizeCases = 100;

enum class GlobalAxis { kNone, kOne, kRows, kBatchRows, kBatch };

struct DequantizeCase {
  uint64_t seed = 0;
  FormatId format = FormatId::kNvfp4;
  ScaleLayoutId layout = ScaleLayoutId::kLinear;
  DType dtype = DType::kF32;
  int64_t batch = 1;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t alignment = 32;
  int64_t gap = 0;
  int64_t misalignment = 0;
  GlobalAxis axis = GlobalAxis::kNone;
  bool divides = false;
  std::vector<int64_t> row_offsets;
};

DequantizeCase sample_dequantize(FormatId format, ScaleLayoutId layout, uint64_t seed) {
  Random random(seed);
  const FormatInfo& info = format_info(format);
  DequantizeCase c{.seed = seed, .format = format, .layout = layout};
  c.dtype = random.pick({DType::kF32, DType::kBF16, DType::kF16});
  c.rows = sample_rows(random);
  c.cols = sample_cols(random, column_multiple(info));
  c.batch = random.chance(25) ? random.range(0, 3) : 1;
  while (c.batch * c.rows * c.cols > 200000) c.rows /= 2;
  if (format == FormatId::kMxfp8) c.alignment = random.pick<int64_t>({32, 64, 128});
  c.gap = random.chance(30) ? random.range(1, 40) : 0;
  c.misalignment = random.range(0, 63);
  if (info.has_row_scale) {
    c.axis = GlobalAxis::kBatchRows;
  } else if (info.has_global_scale) {
    c.axis =
        random.pick({GlobalAxis::kNone, GlobalAxis::kOne, GlobalAxis::kRows, GlobalAxis::kBatch});
  }
  c.divides = info.has_global_scale && random.chance(30);
  if (format == FormatId::kFp8Block1x128 && layout == ScaleLayoutId::kMnMajor &&
      random.chance(40)) {
    c.batch = 1;
    c.row_offsets = {0, c.rows / 3, c.rows / 3, c.rows};
  }
  return c;
}

std::string to_string(const DequantizeCase& c) {
  return fmt::format("{} {} {}x{}x{} -> {} gap {} misaligned {} axis {}{}{}", name(c.format),
                     name(c.layout), c.batch, c.rows, c.cols, name(c.dtype), c.gap, c.misalignment,
                     static_cast<int>(c.axis), c.divides ? " divides" : "",
                     c.row_offsets.empty() ? "" : " groups");
}

// The number of decode scales, and their view ([batch, 1] where the axis must be told apart).
int64_t num_global_scales(const DequantizeCase& c) {
  switch (c.axis) {
    case GlobalAxis::kNone:
      return 0;
    case GlobalAxis::kOne:
      return 1;
    case GlobalAxis::kRows:
      return c.rows;
    case GlobalAxis::kBatchRows:
      return c.batch * c.rows;
    case GlobalAxis::kBatch:
      return c.batch;
  }
  return 0;
}

// F32 block scales: mostly sizes of real scales, sometimes any bits.
void fill_scales(QuantizedTensor& tensor, Random& random) {
  const bool any_bits = random.chance(30);
  for (uint8_t& byte : tensor.values.span()) byte = static_cast<uint8_t>(random.bits());
  if (format_info(tensor.layout.format).scale_type == ScaleType::kF32) {
    for (uint32_t& scale : tensor.scales.span<uint32_t>()) {
      scale = any_bits ? random.bits32() : float_bits(random.normal());
    }
    return;
  }
  for (uint8_t& byte : tensor.scales.span()) {
    byte = static_cast<uint8_t>(random.bits());
    if (random.chance(10)) byte = random.pick<uint8_t>({0, 1, 254, 255, 0x7F});
  }
}

QuantizedTensor make_input(const DequantizeCase& c, const BufferStyle& style) {
  const int64_t groups = c.row_offsets.empty() ? 0 : static_cast<int64_t>(c.row_offsets.size()) - 1;
  const auto layout = quantized_layout(
      c.format, c.rows, c.cols,
      {.scale_layout = c.layout, .batch = c.batch, .alignment = c.alignment, .groups = groups});
  QuantizedTensor tensor(layout, style, num_global_scales(c));
  Random random(c.seed + 1);
  fill_scales(tensor, random);
  const bool any_bits = random.chance(30);
  for (uint32_t& scale : tensor.global_scale.span<uint32_t>()) {
    scale = any_bits ? random.bits32() : float_bits(random.normal());
  }
  TensorView& global = tensor.view.global_scale;
  if (c.axis == GlobalAxis::kNone) global = {};
  if (c.axis == GlobalAxis::kBatch) {
    global = TensorView::contiguous(tensor.global_scale.data(), DType::kF32, {c.batch, 1});
  }
  return tensor;
}

// Empty where the implementation refuses.
std::optional<std::vector<uint8_t>> run_dequantize(const DequantizeCase& c, std::string_view impl,
                                                   uint8_t poison, Guard guard,
                                                   std::string* refusal = nullptr) {
  const BufferStyle style{.poison = poison, .guard = guard, .misalignment = c.misalignment};
  const QuantizedTensor input = make_input(c, style);
  const QuantizedBytes before = bytes_of(input);
  const Matrix output({.dtype = c.dtype,
                       .batch = c.batch,
                       .rows = c.rows,
                       .cols = c.cols,
                       .gap = device_gap(c.gap)},
                      style);
  const Vector offsets = Vector::of(DType::kI64, c.row_offsets);
  const DeviceCopies device(
      {&input.values, &input.scales, &input.global_scale, &output.buffer(), &offsets.buffer()},
      {.on_host = !is_for_device(impl), .programmatic_launch = guard == Guard::kPage});
  DequantizeOptions options{.global_scale_divides = c.divides};
  if (!c.row_offsets.empty()) options.row_offsets = device.view(offsets.view());
  const ForcedImplementation forced("dequantize", impl);
  try {
    dequantize(device.view(input.view), device.view(output.view(c.batch > 1 ? 3 : 2)), options,
               device.stream());
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kUnsupported) throw;
    if (refusal != nullptr) *refusal = error.what();
    return std::nullopt;
  }
  EXPECT_TRUE(device.take_back()) << "a canary on the device was overwritten";
  EXPECT_TRUE(input.intact() && output.buffer().intact()) << "a canary was overwritten";
  EXPECT_EQ(before, bytes_of(input)) << "the input changed";
  // Gaps between rows belong to the caller.
  const auto width = static_cast<size_t>(bits(c.dtype) / 8);
  const auto bytes = output.buffer().span();
  for (int64_t row = 0; row + 1 < output.num_rows(); ++row) {
    for (size_t i = static_cast<size_t>(c.cols) * width;
         i < static_cast<size_t>(output.stride()) * width; ++i) {
      const size_t at = static_cast<size_t>(row * output.stride()) * width + i;
      if (bytes[at] != poison) {
        ADD_FAILURE() << "the gap after row " << row << " was written";
        return output.elements();
      }
    }
  }
  return output.elements();
}

using DequantizeCombination = std::pair<FormatId, ScaleLayoutId>;

std::vector<DequantizeCombination> dequantize_combinations() {
  std::vector<DequantizeCombination> all;
  for (const FormatInfo& info : all_formats()) {
    for (size_t layout = 0; layout < info.layouts.size(); ++layout) {
      if (info.layouts[layout]) all.emplace_back(info.id, static_cast<ScaleLayoutId>(layout));
    }
  }
  return all;
}

std::string dequantize_test_name(const DequantizeCombination& combination) {
  return fmt::format("{}_{}", name(combination.first), name(combination.second));
}

class DequantizeConformance : public DeviceTest<DequantizeCombination> {};

TEST_P(DequantizeConformance, EveryImplementationGivesTheOraclesBytes) {
  Coverage coverage;
  for_cases(kDequantizeCases, [&](int64_t index) {
    const auto [format, layout] = GetParam();
    const DequantizeCase c = sample_dequantize(
        format, layout, case_seed("dequantize" + dequantize_test_name(GetParam()), index));
    const auto oracle = run_dequantize(c, kOracle, 0xCC, Guard::kCanary).value();
    for (const DequantizeImpl& impl : dequantize_impls()) {
      if (!is_for_device(impl.name)) continue;
      const std::string note = repro_line("dequantize", impl.name, index) + "\n  " + to_string(c);
      set_crash_note(note.c_str());
      for (const auto& [poison, guard] :
           {std::pair{uint8_t{0xCC}, Guard::kCanary}, std::pair{uint8_t{0xFF}, Guard::kPage}}) {
        std::string refusal;
        const auto output = run_dequantize(c, impl.name, poison, guard, &refusal);
        output ? coverage.ran(impl.name) : coverage.refused(impl.name, refusal);
        EXPECT_TRUE(!output || *output == oracle) << note;
      }
    }
    coverage.end_case(true, to_string(c));
  });
  coverage.report(dequantize_test_name(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(All, DequantizeConformance, ::testing::ValuesIn(dequantize_combinations()),
                         [](const auto& test) { return dequantize_test_name(test.param); });

TEST(DequantizeImplementations, EndWithTheOracle) {
  ASSERT_FALSE(dequantize_impls().empty());
  EXPECT_EQ(dequantize_impls().back().name, kOracle);
}

}  // namespace
}  // namespace narrowfloat::testing
