// Every implementation of relayout, for every format and pair of layouts, against positions taken
// from scale_offset() one scale at a time.
#include <cstring>
#include <ostream>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "conformance/case_sampling.h"
#include "conformance/coverage.h"
#include "narrowfloat/error.h"
#include "ops/relayout/relayout_problem.h"
#include "support/device_copies.h"
#include "support/environment.h"
#include "support/guarded_buffer.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kRelayoutCases = 40;

struct RelayoutCombination {
  FormatId format;
  ScaleLayoutId from;
  ScaleLayoutId to;
};

std::vector<RelayoutCombination> relayout_combinations() {
  std::vector<RelayoutCombination> all;
  for (const FormatInfo& info : all_formats()) {
    for (size_t from = 0; from < info.layouts.size(); ++from) {
      for (size_t to = 0; to < info.layouts.size(); ++to) {
        if (!info.layouts[from] || !info.layouts[to]) continue;
        all.push_back({info.id, static_cast<ScaleLayoutId>(from), static_cast<ScaleLayoutId>(to)});
      }
    }
  }
  return all;
}

std::string relayout_test_name(const RelayoutCombination& c) {
  return fmt::format("{}_{}_to_{}", name(c.format), name(c.from), name(c.to));
}

struct Extents {
  int64_t batch;
  int64_t rows;
  int64_t blocks;
};

ScaleView scale_view(const RelayoutCombination& c, ScaleLayoutId layout, const Extents& extents,
                     const GuardedBuffer& buffer) {
  const ScaleType type = format_info(c.format).scale_type;
  return {.data = buffer.data(),
          .type = type,
          .layout = layout,
          .batch = extents.batch,
          .rows = extents.rows,
          .blocks = extents.blocks,
          .capacity = buffer.size() / bytes(type)};
}

GuardedBuffer scale_buffer(const RelayoutCombination& c, ScaleLayoutId layout,
                           const Extents& extents, const BufferStyle& style) {
  const int64_t scales = extents.batch * scale_image_size(layout, extents.rows, extents.blocks);
  return {scales * bytes(format_info(c.format).scale_type), style};
}

// One scale at a time; padding zero.
std::vector<uint8_t> expected_scales(const RelayoutCombination& c, const Extents& extents,
                                     const GuardedBuffer& input) {
  const auto width = static_cast<size_t>(bytes(format_info(c.format).scale_type));
  const int64_t from = scale_image_size(c.from, extents.rows, extents.blocks);
  const int64_t to = scale_image_size(c.to, extents.rows, extents.blocks);
  std::vector<uint8_t> expected(static_cast<size_t>(extents.batch * to) * width, 0);
  for (int64_t batch = 0; batch < extents.batch; ++batch) {
    for (int64_t row = 0; row < extents.rows; ++row) {
      for (int64_t block = 0; block < extents.blocks; ++block) {
        const int64_t source =
            batch * from + scale_offset(c.from, row, block, extents.rows, extents.blocks);
        const int64_t target =
            batch * to + scale_offset(c.to, row, block, extents.rows, extents.blocks);
        std::memcpy(expected.data() + static_cast<size_t>(target) * width,
                    input.data() + static_cast<size_t>(source) * width, width);
      }
    }
  }
  return expected;
}

void PrintTo(const RelayoutCombination& combination, std::ostream* out) {
  *out << relayout_test_name(combination);
}

class RelayoutConformance : public DeviceTest<RelayoutCombination> {};

TEST_P(RelayoutConformance, EveryImplementationMovesEveryScale) {
  Coverage coverage;
  for_cases(kRelayoutCases, [&](int64_t index) {
    const RelayoutCombination& c = GetParam();
    Random random(case_seed("relayout" + relayout_test_name(c), index));
    const Extents extents{.batch = random.range(0, 3),
                          .rows = sample_rows(random),
                          .blocks = random.chance(70) ? random.range(0, 20) : random.range(0, 70)};
    for (const RelayoutImpl& impl : relayout_impls()) {
      if (!is_for_device(impl.name)) continue;
      const std::string note =
          fmt::format("{}\n  {} {}x{}x{}", repro_line("relayout", impl.name, index),
                      relayout_test_name(c), extents.batch, extents.rows, extents.blocks);
      set_crash_note(note.c_str());
      for (const Guard guard : {Guard::kCanary, Guard::kPage}) {
        const uint8_t poison = guard == Guard::kPage ? 0xFF : 0xCC;
        const GuardedBuffer input = scale_buffer(c, c.from, extents, {.guard = guard});
        // Padding of the input is garbage too: it is dropped, never copied.
        for (uint8_t& byte : input.span()) byte = static_cast<uint8_t>(random.bits() | 1U);
        const GuardedBuffer output =
            scale_buffer(c, c.to, extents, {.poison = poison, .guard = guard});
        const std::vector<uint8_t> before = input.copy();
        const DeviceCopies device({&input, &output},
                                  {.programmatic_launch = guard == Guard::kPage});
        const ForcedImplementation forced("relayout", impl.name);
        try {
          relayout(c.format, device.view(scale_view(c, c.from, extents, input)),
                   device.view(scale_view(c, c.to, extents, output)), device.stream());
        } catch (const Error& error) {
          ASSERT_EQ(error.kind(), ErrorKind::kUnsupported) << error.what() << "\n" << note;
          coverage.refused(impl.name, error.what());
          continue;
        }
        coverage.ran(impl.name);
        EXPECT_TRUE(device.take_back()) << note;
        EXPECT_EQ(expected_scales(c, extents, input), output.copy()) << note;
        EXPECT_EQ(before, input.copy()) << note;
        EXPECT_TRUE(input.intact() && output.intact()) << note;
      }
    }
    coverage.end_case(true, relayout_test_name(c));
  });
  coverage.report(relayout_test_name(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(All, RelayoutConformance, ::testing::ValuesIn(relayout_combinations()),
                         [](const auto& test) { return relayout_test_name(test.param); });

TEST(RelayoutImplementations, EndWithTheOracle) {
  ASSERT_FALSE(relayout_impls().empty());
  EXPECT_EQ(relayout_impls().back().name, "cpu_reference");
}

}  // namespace
}  // namespace narrowfloat::testing
