// Every implementation of quantize_group_8bit against a plain model: quotients and products in
// double precision, rounded once, and codes found by going through all of them.
#include <array>
#include <cmath>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/host_device.h"
#include "conformance/case_sampling.h"
#include "conformance/coverage.h"
#include "ops/group_quantize/group_quantize_problem.h"
#include "support/environment.h"
#include "support/tensors.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kGroupQuantizeCases = 50;

// The nearest of the magnitudes 0 to `largest`, of two the even code; NaN is 0x7F.
uint8_t nearest_code(double x, int mantissa_bits, int largest) {
  if (std::isnan(x)) return 0x7F;
  const int bias = mantissa_bits == 3 ? 7 : 15;
  const auto value = [&](int code) {
    const int exponent = code >> mantissa_bits;
    const double mantissa = (code & ((1 << mantissa_bits) - 1)) / double(1 << mantissa_bits);
    return exponent == 0 ? std::ldexp(mantissa, 1 - bias)
                         : std::ldexp(1 + mantissa, exponent - bias);
  };
  const double magnitude = std::min(std::abs(x), value(largest));
  int best = 0;
  for (int code = 1; code <= largest; ++code) {
    const double distance = std::abs(value(code) - magnitude);
    const double before = std::abs(value(best) - magnitude);
    if (distance < before || (distance == before && code % 2 == 0)) best = code;
  }
  return static_cast<uint8_t>(best | (std::signbit(x) ? 0x80 : 0));
}

uint8_t model_code(DType output, float x) {
  if (output == DType::kF8E4M3) return nearest_code(x, 3, 0x7E);
  if (output == DType::kF8E5M2) return nearest_code(x, 2, 0x7B);
  if (std::isnan(x)) return 0;
  const float shifted = std::floor(std::fmin(std::fmax(x, -128.0F), 127.0F) + 0.5F);
  return static_cast<uint8_t>(static_cast<int>(shifted));
}

float model_scale(const Matrix& input, int64_t row, int64_t first, const GroupQuantizeOptions& o,
                  DType output) {
  float largest = o.eps;
  for (int64_t i = 0; i < o.group_size; ++i) {
    const float magnitude = std::abs(input.at(row, first + i));
    if (magnitude > largest) largest = magnitude;
  }
  const double max8 = output == DType::kF8E4M3 ? 448 : output == DType::kF8E5M2 ? 57344 : 127;
  const auto scale = static_cast<float>(double{largest} / max8);
  if (!o.power_of_two_scales || std::isinf(scale)) return scale;
  float power = 0x1p-40F;
  while (power < scale || power < 1e-10F) power *= 2;
  return power;
}

struct Expected {
  std::vector<uint8_t> values;
  std::vector<float> scales;
};

Expected model(const Matrix& input, const GroupQuantizeOptions& o, DType output,
               int64_t scale_rows) {
  const int64_t rows = input.num_rows();
  const int64_t cols = input.shape().cols;
  const int64_t groups = cols / o.group_size;
  const bool is_row_major = o.scale_order == GroupScaleOrder::kRowMajor;
  Expected expected{.values = std::vector<uint8_t>(static_cast<size_t>(rows * cols)),
                    .scales = std::vector<float>(static_cast<size_t>(scale_rows * groups), 0.0F)};
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t first = group * o.group_size;
      const float scale = model_scale(input, row, first, o, output);
      const int64_t at = is_row_major ? row * groups + group : group * scale_rows + row;
      expected.scales[static_cast<size_t>(at)] = scale;
      const auto reciprocal = static_cast<float>(1.0 / double{scale});
      for (int64_t i = first; i < first + o.group_size; ++i) {
        const double x = input.at(row, i);
        const double scaled = is_row_major ? x * double{reciprocal} : x / double{scale};
        expected.values[static_cast<size_t>(row * cols + i)] =
            model_code(output, static_cast<float>(scaled));
      }
    }
  }
  return expected;
}

struct GroupQuantizeTypes {
  DType input;
  DType output;
};

class GroupQuantizeConformance : public DeviceTest<GroupQuantizeTypes> {};

GroupQuantizeOptions sample_options(Random& random) {
  GroupQuantizeOptions options;
  options.group_size = random.chance(70) ? random.pick<int64_t>({16, 32, 64, 128, 256, 48, 1040})
                                         : random.range(1, 140);
  options.eps = random.pick({1e-10F, 1e-4F, 0x1p-100F, 3.0F});
  options.scale_order = static_cast<GroupScaleOrder>(random.range(0, 2));
  options.power_of_two_scales =
      options.scale_order != GroupScaleOrder::kRowMajor && random.chance(50);
  return options;
}

TEST_P(GroupQuantizeConformance, EveryImplementationGivesTheBytes) {
  const auto [input_type, output_type] = GetParam();
  const std::string types = fmt::format("{} to {}", name(input_type), name(output_type));
  Coverage coverage;
  for_cases(kGroupQuantizeCases, [&, input_type = input_type,
                                  output_type = output_type](int64_t index) {
    Random random(case_seed("group_quantize " + types, index));
    const GroupQuantizeOptions options = sample_options(random);
    const bool is_row_major = options.scale_order == GroupScaleOrder::kRowMajor;
    MatrixShape shape{.dtype = input_type,
                      .batch = is_row_major ? random.range(0, 3) : 1,
                      .rows = random.range(0, 12),
                      .cols = random.range(0, 5) * options.group_size};
    // Rows of a GPU lie 16 bytes apart.
    shape.gap = device_gap(shape.cols + (random.chance(30) ? 8 : 0)) - shape.cols;
    const auto fill = static_cast<Fill>(random.range(0, kNumFills - 1));
    const uint64_t seed = random.bits();
    const int64_t groups = shape.cols / options.group_size;
    for (const GroupQuantizeImpl& impl : group_quantize_impls()) {
      if (!is_for_device(impl.name)) continue;
      const std::string note =
          fmt::format("{}\n  {} {}x{}x{} in {} eps {} order {} {}",
                      repro_line("group_quantize", impl.name, index), name(fill), shape.batch,
                      shape.rows, shape.cols, options.group_size, options.eps,
                      static_cast<int>(options.scale_order), options.power_of_two_scales);
      set_crash_note(note.c_str());
      for (const Guard guard : {Guard::kCanary, Guard::kPage}) {
        const BufferStyle style{.poison = guard == Guard::kPage ? uint8_t{0xFF} : uint8_t{0xCC},
                                .guard = guard};
        const Matrix input = Matrix::filled(shape, fill, seed, style);
        const int64_t rows = input.num_rows();
        const int64_t scale_rows =
            options.scale_order == GroupScaleOrder::kColumnMajorAligned ? (rows + 3) / 4 * 4 : rows;
        const Expected expected = model(input, options, output_type, scale_rows);
        const GuardedBuffer values(rows * shape.cols, style);
        const Vector scales(DType::kF32, scale_rows * groups, style);
        TensorView codes = TensorView::contiguous(values.data(), output_type,
                                                  {shape.batch, shape.rows, shape.cols});
        TensorView factors = TensorView::contiguous(scales.view().data, DType::kF32,
                                                    {shape.batch, shape.rows, groups});
        if (!is_row_major) {
          codes = TensorView::contiguous(codes.data, output_type, {rows, shape.cols});
          factors = TensorView::contiguous(factors.data, DType::kF32, {groups, scale_rows});
        }
        const DeviceCopies device({&input.buffer(), &values, &scales.buffer()},
                                  {.programmatic_launch = guard == Guard::kPage});
        const ForcedImplementation forced("group_quantize", impl.name);
        quantize_group_8bit(device.view(input.view(is_row_major ? 3 : 2)), device.view(codes),
                            device.view(factors), options, device.stream());
        coverage.ran(impl.name);
        EXPECT_TRUE(device.take_back()) << note;
        EXPECT_TRUE(values.intact() && scales.buffer().intact()) << note;
        EXPECT_EQ(expected.values, values.copy()) << note;
        const auto actual = scales.buffer().span<float>();
        EXPECT_EQ(expected.scales, std::vector<float>(actual.begin(), actual.end())) << note;
      }
    }
    coverage.end_case(true, types);
  });
  coverage.report(types);
}

std::vector<GroupQuantizeTypes> group_quantize_types() {
  std::vector<GroupQuantizeTypes> all;
  for (const DType input : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const DType output : {DType::kF8E4M3, DType::kF8E5M2, DType::kI8}) {
      all.push_back({input, output});
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, GroupQuantizeConformance, ::testing::ValuesIn(group_quantize_types()),
                         [](const auto& test) {
                           return fmt::format("{}_{}", name(test.param.input),
                                              name(test.param.output));
                         });

}  // namespace
}  // namespace narrowfloat::testing
