// Every implementation of encode_scales_from_decode against the converter of a number, and what the
// function refuses.
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "base/host_device.h"
#include "conformance/case_sampling.h"
#include "conformance/coverage.h"
#include "ops/quantize/scale_inversion.h"
#include "support/device_copies.h"
#include "support/environment.h"
#include "support/expect_error.h"
#include "support/tensors.h"

namespace narrowfloat::testing {
namespace {

// Ordinary scales, all magnitudes, and what has no reciprocal.
std::vector<float> sample_scales(int64_t count, Random& random) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  std::vector<float> scales{1.0F, 3.0F, 0.0F, -0.0F, kInf, 0x1p-127F, 0x1p127F, -kInf, 0x1.8p-1F};
  scales.resize(static_cast<size_t>(count));
  for (size_t i = 9; i < scales.size(); ++i) {
    scales[i] = bits_float(static_cast<uint32_t>(random.bits()));
  }
  return scales;
}

class ScaleInversionConformance : public DeviceTest<MathMode> {};

TEST_P(ScaleInversionConformance, EveryImplementationIsTheConverterOfANumber) {
  Random random(7);
  for (const int64_t count : {1, 2, 127, 128, 129, 5000}) {
    const std::vector<float> scales = sample_scales(count, random);
    for (const ScaleInversionImpl& impl : scale_inversion_impls()) {
      if (!is_for_device(impl.name)) continue;
      const Vector input = Vector::of(DType::kF32, scales);
      const Vector output(DType::kF32, count);
      const DeviceCopies device({&input.buffer(), &output.buffer()}, {.programmatic_launch = true});
      const ForcedImplementation forced("invert_scales", impl.name);
      encode_scales_from_decode(device.view(input.view()), device.view(output.view()), GetParam(),
                                device.stream());
      EXPECT_TRUE(device.take_back());
      const auto actual = output.buffer().span<uint32_t>();
      for (size_t i = 0; i < scales.size(); ++i) {
        const float wanted = canonical_nan(encode_scale_from_decode(scales[i], GetParam()));
        ASSERT_EQ(actual[i], float_bits(wanted)) << impl.name << " of " << scales[i];
      }
      EXPECT_TRUE(input.buffer().intact() && output.buffer().intact());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, ScaleInversionConformance,
                         ::testing::Values(MathMode::kExact, MathMode::kFast),
                         [](const auto& test) { return std::string(name(test.param)); });

TEST(ScaleInversion, RefusesOtherTypesAndSizes) {
  const Vector scales = Vector::of(DType::kF32, std::vector{1.0F, 2.0F});
  const Vector one(DType::kF32, 1);
  const Vector halves(DType::kF16, 2);
  expect_error(ErrorKind::kInvalidArgument, {"encode_scales", "F32[1]"},
               [&] { encode_scales_from_decode(scales.view(), one.view()); });
  expect_error(ErrorKind::kInvalidArgument, {"decode_scales", "F16"},
               [&] { encode_scales_from_decode(halves.view(), scales.view()); });
  expect_error(ErrorKind::kInvalidArgument, {"encode_scales"},
               [&] { encode_scales_from_decode(scales.view(), scales.view()); });
}

}  // namespace
}  // namespace narrowfloat::testing
