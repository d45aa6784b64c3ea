// Every implementation of tensor_amax and row_amax against a maximum over bit patterns.
#include <algorithm>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/host_device.h"
#include "conformance/case_sampling.h"
#include "conformance/coverage.h"
#include "narrowfloat/error.h"
#include "ops/amax/amax_problem.h"
#include "support/device_copies.h"
#include "support/environment.h"
#include "support/tensors.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kAmaxCases = 250;

// Integers order non-negative floats; NaN is what lies above infinity.
uint32_t row_maximum(const Matrix& input, int64_t row) {
  uint32_t largest = 0;
  for (int64_t col = 0; col < input.shape().cols; ++col) {
    const uint32_t magnitude = float_bits(input.at(row, col)) & 0x7FFFFFFFU;
    if (magnitude <= 0x7F800000U) largest = std::max(largest, magnitude);
  }
  return largest;
}

std::vector<uint32_t> expected_maxima(const Matrix& input, bool per_row) {
  std::vector<uint32_t> rows;
  for (int64_t row = 0; row < input.num_rows(); ++row) rows.push_back(row_maximum(input, row));
  if (per_row) return rows;
  return {rows.empty() ? 0 : *std::max_element(rows.begin(), rows.end())};
}

class AmaxConformance : public DeviceTest<DType> {};

TEST_P(AmaxConformance, EveryImplementationFindsTheMaximum) {
  Coverage coverage;
  for_cases(kAmaxCases, [&](int64_t index) {
    Random random(case_seed("amax" + std::string(name(GetParam())), index));
    MatrixShape shape{.dtype = GetParam(),
                      .batch = random.chance(30) ? random.range(0, 3) : 1,
                      .rows = sample_rows(random),
                      .cols = random.chance(50) ? random.range(0, 70) : sample_cols(random, 1),
                      .gap = random.chance(30) ? random.range(1, 40) : 0};
    while (shape.batch * shape.rows * shape.cols > 200000) shape.rows /= 2;
    const auto fill = static_cast<Fill>(random.range(0, kNumFills - 1));
    const bool per_row = random.chance(50);
    const uint64_t seed = random.bits();
    for (const AmaxImpl& impl : amax_impls()) {
      if (!is_for_device(impl.name)) continue;
      const std::string note = fmt::format(
          "{}\n  {} {}x{}x{} gap {} {}", repro_line("amax", impl.name, index), name(fill),
          shape.batch, shape.rows, shape.cols, shape.gap, per_row ? "rows" : "tensor");
      set_crash_note(note.c_str());
      for (const Guard guard : {Guard::kCanary, Guard::kPage}) {
        const BufferStyle style{.poison = guard == Guard::kPage ? uint8_t{0x7F} : uint8_t{0xCC},
                                .guard = guard,
                                .misalignment = 4};
        const Matrix input = Matrix::filled(shape, fill, seed, style);
        const std::vector<uint32_t> expected = expected_maxima(input, per_row);
        const Vector output(DType::kF32, static_cast<int64_t>(expected.size()), style);
        const std::vector<uint8_t> before = input.buffer().copy();
        // Maxima take any alignment on every device.
        const DeviceCopies device({&input.buffer(), &output.buffer()},
                                  {.alignment = 1, .programmatic_launch = guard == Guard::kPage});
        const ForcedImplementation forced("amax", impl.name);
        try {
          const TensorView view = device.view(input.view(shape.batch == 1 ? 2 : 3));
          const TensorView maxima = device.view(output.view());
          per_row ? row_amax(view, maxima, device.stream())
                  : tensor_amax(view, maxima, device.stream());
        } catch (const Error& error) {
          ASSERT_EQ(error.kind(), ErrorKind::kUnsupported) << error.what() << "\n" << note;
          coverage.refused(impl.name, error.what());
          continue;
        }
        coverage.ran(impl.name);
        EXPECT_TRUE(device.take_back()) << note;
        const auto actual = output.buffer().span<uint32_t>();
        EXPECT_EQ(expected, std::vector<uint32_t>(actual.begin(), actual.end())) << note;
        EXPECT_TRUE(output.buffer().intact() && input.buffer().intact()) << note;
        EXPECT_EQ(before, input.buffer().copy()) << note;
      }
    }
    coverage.end_case(true, name(GetParam()));
  });
  coverage.report(name(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(All, AmaxConformance,
                         ::testing::Values(DType::kF32, DType::kF16, DType::kBF16),
                         [](const auto& test) { return std::string(name(test.param)); });

TEST(AmaxImplementations, EndWithTheOracle) {
  ASSERT_FALSE(amax_impls().empty());
  EXPECT_EQ(amax_impls().back().name, "cpu_reference");
}

}  // namespace
}  // namespace narrowfloat::testing
