// Every implementation of encode_scales_from_decode against IEEE, the converter of a number and the
// vectors of the specification; and what the function refuses.
#include <limits>
#include <string_view>
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

// The bits that an implementation gives; buffers around and before the result stay as they are.
std::vector<uint32_t> invert(std::string_view impl, const std::vector<float>& scales,
                             MathMode math) {
  const Vector input = Vector::of(DType::kF32, scales);
  const Vector output(DType::kF32, static_cast<int64_t>(scales.size()));
  const DeviceCopies device({&input.buffer(), &output.buffer()}, {.programmatic_launch = true});
  const ForcedImplementation forced("invert_scales", impl);
  encode_scales_from_decode(device.view(input.view()), device.view(output.view()), math,
                            device.stream());
  EXPECT_TRUE(device.take_back());
  EXPECT_TRUE(input.buffer().intact() && output.buffer().intact());
  const auto bits = output.buffer().span<uint32_t>();
  return {bits.begin(), bits.end()};
}

class ScaleInversionConformance : public DeviceTest<MathMode> {};

// Exact mode is IEEE's quotient; fast mode the converter of a number, whose bits
// GivesTheBitsOfTheTable pins.
TEST_P(ScaleInversionConformance, EveryImplementationInvertsAnyScale) {
  Random random(7);
  for (const int64_t count : {1, 2, 127, 128, 129, 5000}) {
    const std::vector<float> scales = sample_scales(count, random);
    for (const ScaleInversionImpl& impl : scale_inversion_impls()) {
      if (!is_for_device(impl.name)) continue;
      const std::vector<uint32_t> actual = invert(impl.name, scales, GetParam());
      for (size_t i = 0; i < scales.size(); ++i) {
        const float wanted = GetParam() == MathMode::kExact
                                 ? canonical_nan(1.0F / scales[i])
                                 : encode_scale_from_decode(scales[i], MathMode::kFast);
        ASSERT_EQ(actual[i], float_bits(wanted)) << impl.name << " of " << scales[i];
      }
    }
  }
}

// The inputs are the specification's vectors and its table of a GPU's reciprocals, with IEEE's
// beside them.
TEST_P(ScaleInversionConformance, GivesTheBitsOfTheTable) {
  struct Line {
    uint32_t decode, fast, exact;
  };
  const std::vector<Line> lines{
      {0x40400000U, 0x3EAAAAABU, 0x3EAAAAABU}, {0x42040000U, 0x3CF83E0FU, 0x3CF83E10U},
      {0x42740000U, 0x3C864B8BU, 0x3C864B8AU}, {0x00400000U, 0x7F800000U, 0x7F000000U},
      {0x80400000U, 0xFF800000U, 0xFF000000U}, {0x7E800001U, 0x00000000U, 0x007FFFFFU},
      {0x00000000U, 0x7F800000U, 0x7F800000U}, {0xFF800000U, 0x80000000U, 0x80000000U},
      {0x7FC00000U, 0x7FFFFFFFU, 0x7FFFFFFFU}, {0xFFC00001U, 0x7FFFFFFFU, 0x7FFFFFFFU}};
  std::vector<float> scales;
  scales.reserve(lines.size());
  for (const Line& line : lines) scales.push_back(bits_float(line.decode));
  for (const ScaleInversionImpl& impl : scale_inversion_impls()) {
    if (!is_for_device(impl.name)) continue;
    const std::vector<uint32_t> actual = invert(impl.name, scales, GetParam());
    for (size_t i = 0; i < lines.size(); ++i) {
      const uint32_t wanted = GetParam() == MathMode::kExact ? lines[i].exact : lines[i].fast;
      EXPECT_EQ(actual[i], wanted) << impl.name << " of " << scales[i];
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
  const auto refuses = [](const TensorView& decode, const TensorView& encode,
                          const std::vector<std::string>& fragments) {
    expect_error(ErrorKind::kInvalidArgument, fragments,
                 [&] { encode_scales_from_decode(decode, encode); });
  };
  refuses(scales.view(), one.view(), {"encode_scales", "F32[1]"});
  refuses(halves.view(), scales.view(), {"decode_scales", "F16"});
  refuses(scales.view(), scales.view(), {"encode_scales: overlaps decode_scales"});
  TensorView elsewhere = scales.view();
  elsewhere.device = {.type = DeviceType::kCuda, .index = 1};
  refuses(Vector(DType::kF32, 2).view(), elsewhere, {"encode_scales", "cpu", "cuda:1"});
  const Vector four(DType::kF32, 4);
  TensorView strided = four.view();
  strided.shape[0] = 2;
  strided.strides[0] = 2;
  refuses(strided, scales.view(), {"decode_scales", "dense"});
}

}  // namespace
}  // namespace narrowfloat::testing
