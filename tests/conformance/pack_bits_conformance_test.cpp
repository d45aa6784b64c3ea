// Every implementation of the packing of bits, against bits set one at a time; on a device also
// offsets that make no sense.
#include <algorithm>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "conformance/case_sampling.h"
#include "conformance/coverage.h"
#include "ops/pack_bits/pack_bits_problem.h"
#include "support/environment.h"
#include "support/tensors.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kPackBitsCases = 120;

std::vector<uint8_t> packed(const uint8_t* elements, int64_t count, BitOrder order) {
  std::vector<uint8_t> bytes(static_cast<size_t>((count + 7) / 8), 0);
  for (int64_t i = 0; i < count; ++i) {
    const int shift = static_cast<int>(order == BitOrder::kBig ? 7 - i % 8 : i % 8);
    if (elements[i] != 0) bytes[static_cast<size_t>(i / 8)] |= static_cast<uint8_t>(1 << shift);
  }
  return bytes;
}

GuardedBuffer sample_elements(Random& random, int64_t count, const BufferStyle& style) {
  GuardedBuffer elements(count, style);
  const bool is_bool = random.chance(50);
  for (uint8_t& element : elements.span()) {
    element = random.chance(50) ? 0 : is_bool ? 1 : static_cast<uint8_t>(random.bits() | 1U);
  }
  return elements;
}

int64_t sample_count(Random& random) {
  if (random.chance(60)) return random.range(0, 100);
  return random.chance(50) ? random.range(0, 3000) : random.range(8100, 8300);
}

TensorView bytes_view(const GuardedBuffer& buffer, DType dtype = DType::kU8) {
  return TensorView::contiguous(buffer.data(), dtype, {buffer.size()});
}

class PackBitsConformance : public DeviceTest<BitOrder> {
 protected:
  template <typename Call>
  void for_implementations(const std::string& what, int64_t index, const Call& call) {
    for (const PackBitsImpl& impl : pack_bits_impls()) {
      if (!is_for_device(impl.name)) continue;
      const std::string note =
          fmt::format("{}\n  {}", repro_line("pack_bits", impl.name, index), what);
      set_crash_note(note.c_str());
      const ForcedImplementation forced("pack_bits", impl.name);
      SCOPED_TRACE(note);
      for (const Guard guard : {Guard::kCanary, Guard::kPage}) call(guard);
      coverage_.ran(impl.name);
    }
    coverage_.end_case(true, what);
  }

  Coverage coverage_;
};

TEST_P(PackBitsConformance, EveryImplementationPacksARun) {
  for_cases(kPackBitsCases, [&](int64_t index) {
    Random random(case_seed("pack bits", index));
    const int64_t count = sample_count(random);
    for_implementations(fmt::format("{} elements", count), index, [&](Guard guard) {
      const GuardedBuffer input = sample_elements(random, count, {.guard = guard});
      const GuardedBuffer output((count + 7) / 8, {.guard = guard});
      const DeviceCopies device({&input, &output}, {.programmatic_launch = guard == Guard::kPage});
      pack_bits(device.view(bytes_view(input, DType::kBool)), device.view(bytes_view(output)),
                GetParam(), device.stream());
      EXPECT_TRUE(device.take_back());
      EXPECT_TRUE(input.intact() && output.intact());
      EXPECT_EQ(packed(input.data(), count, GetParam()), output.copy());
    });
  });
  coverage_.report("runs");
}

TEST_P(PackBitsConformance, EveryImplementationPacksSegments) {
  for_cases(kPackBitsCases, [&](int64_t index) {
    Random random(case_seed("segment pack bits", index));
    const int64_t count = sample_count(random);
    const int64_t segments = random.chance(90) ? random.range(0, 40) : random.range(1000, 2500);
    const bool is_wide = random.chance(50);
    std::vector<int64_t> offsets(static_cast<size_t>(segments) + 1);
    for (int64_t& offset : offsets) offset = random.range(0, count);
    std::sort(offsets.begin(), offsets.end());
    // From the first to the last element in most cases.
    if (random.chance(70)) offsets.front() = 0;
    if (random.chance(70)) offsets.back() = count;
    const auto what = fmt::format("{} elements in {} segments", count, segments);
    for_implementations(what, index, [&](Guard guard) {
      const BufferStyle style{.guard = guard};
      const GuardedBuffer input = sample_elements(random, count, style);
      const GuardedBuffer output(segment_packed_bytes(count, segments) + random.range(0, 9), style);
      const DType dtype = is_wide ? DType::kI64 : DType::kI32;
      const Vector in =
          is_wide ? Vector::of(dtype, offsets, style)
                  : Vector::of(dtype, std::vector<int32_t>(offsets.begin(), offsets.end()), style);
      const Vector out(dtype, segments + 1, style);
      const DeviceCopies device({&input, &output, &in.buffer(), &out.buffer()},
                                {.programmatic_launch = guard == Guard::kPage});
      segment_pack_bits(device.view(bytes_view(input)), device.view(in.view()),
                        device.view(bytes_view(output)), device.view(out.view()), GetParam(),
                        device.stream());
      EXPECT_TRUE(device.take_back());
      EXPECT_TRUE(input.intact() && output.intact() && in.buffer().intact());
      std::vector<uint8_t> expected;
      const Indices starts{out.buffer().data(), is_wide};
      for (int64_t i = 0; i < segments; ++i) {
        ASSERT_EQ(static_cast<int64_t>(expected.size()), starts[i]) << "segment " << i;
        const int64_t begin = offsets[static_cast<size_t>(i)];
        const auto bytes =
            packed(input.data() + begin, offsets[static_cast<size_t>(i) + 1] - begin, GetParam());
        expected.insert(expected.end(), bytes.begin(), bytes.end());
      }
      ASSERT_EQ(static_cast<int64_t>(expected.size()), starts[segments]);
      expected.resize(static_cast<size_t>(output.size()), 0xCC);
      EXPECT_EQ(expected, output.copy());
    });
  });
  coverage_.report("segments");
}

TEST_P(PackBitsConformance, OffsetsOfADeviceNeverLeadOutside) {
  if (device_under_test().type == DeviceType::kCpu) GTEST_SKIP() << "checked on the CPU";
  for_cases(kPackBitsCases / 4, [&](int64_t index) {
    Random random(case_seed("bad segments", index));
    const int64_t count = sample_count(random);
    std::vector<int64_t> offsets(static_cast<size_t>(random.range(1, 50)));
    for (int64_t& offset : offsets) {
      offset =
          random.chance(50) ? random.range(-count, 2 * count) : static_cast<int64_t>(random.bits());
    }
    const auto segments = static_cast<int64_t>(offsets.size()) - 1;
    for_implementations("bad_offsets", index, [&](Guard guard) {
      const BufferStyle style{.guard = guard};
      const GuardedBuffer input = sample_elements(random, count, style);
      const GuardedBuffer output(segment_packed_bytes(count, segments), style);
      const Vector in = Vector::of(DType::kI64, offsets, style);
      const Vector out(DType::kI64, segments + 1, style);
      const DeviceCopies device({&input, &output, &in.buffer(), &out.buffer()});
      segment_pack_bits(device.view(bytes_view(input)), device.view(in.view()),
                        device.view(bytes_view(output)), device.view(out.view()), GetParam(),
                        device.stream());
      EXPECT_TRUE(device.take_back());
    });
  });
}

INSTANTIATE_TEST_SUITE_P(All, PackBitsConformance,
                         ::testing::Values(BitOrder::kBig, BitOrder::kLittle),
                         [](const auto& test) {
                           return std::string(test.param == BitOrder::kBig ? "big" : "little");
                         });

}  // namespace
}  // namespace narrowfloat::testing
