// Laws of relayout, and every check at its door.
#include <array>
#include <ostream>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "support/expect_error.h"
#include "support/tensors.h"

namespace narrowfloat::testing {
namespace {

struct ScaleTensor {
  ScaleView view;
  GuardedBuffer buffer;
};

ScaleTensor make_scales(FormatId format, ScaleLayoutId layout, int64_t batch, int64_t rows,
                        int64_t blocks) {
  const ScaleType type = format_info(format).scale_type;
  const int64_t count = batch * scale_image_size(layout, rows, blocks);
  ScaleTensor scales{.view = {}, .buffer = GuardedBuffer(count * bytes(type), {})};
  scales.view = {.data = scales.buffer.data(),
                 .type = type,
                 .layout = layout,
                 .batch = batch,
                 .rows = rows,
                 .blocks = blocks,
                 .capacity = count};
  return scales;
}

std::vector<ScaleLayoutId> layouts_of(FormatId format) {
  std::vector<ScaleLayoutId> layouts;
  for (size_t i = 0; i < 4; ++i) {
    if (format_info(format).layouts[i]) layouts.push_back(static_cast<ScaleLayoutId>(i));
  }
  return layouts;
}

RC_GTEST_PROP(RelayoutLaws, AnyPathBetweenLayoutsGivesTheSameScales, ()) {
  const FormatId format =
      *rc::gen::element(FormatId::kNvfp4, FormatId::kMxfp8, FormatId::kFp8Block1x128);
  const int64_t batch = *rc::gen::inRange(0, 3);
  const int64_t rows = *rc::gen::inRange(0, 200);
  const int64_t blocks = *rc::gen::inRange(0, 12);
  Random random(*rc::gen::arbitrary<uint64_t>());
  const ScaleTensor start = make_scales(format, ScaleLayoutId::kLinear, batch, rows, blocks);
  for (uint8_t& byte : start.buffer.span()) byte = static_cast<uint8_t>(random.bits());
  const auto path =
      *rc::gen::container<std::vector<ScaleLayoutId>>(3, rc::gen::elementOf(layouts_of(format)));
  ScaleTensor direct = make_scales(format, path.back(), batch, rows, blocks);
  relayout(format, start.view, direct.view);
  ScaleTensor at = make_scales(format, path.front(), batch, rows, blocks);
  relayout(format, start.view, at.view);
  for (const ScaleLayoutId layout : path) {
    ScaleTensor next = make_scales(format, layout, batch, rows, blocks);
    relayout(format, at.view, next.view);
    at = std::move(next);
  }
  RC_ASSERT(at.buffer.copy() == direct.buffer.copy());
  // And home again.
  ScaleTensor home = make_scales(format, ScaleLayoutId::kLinear, batch, rows, blocks);
  relayout(format, at.view, home.view);
  RC_ASSERT(home.buffer.copy() == start.buffer.copy());
}

struct RelayoutViolation {
  const char* name;
  void (*apply)(FormatId& format, ScaleView& input, ScaleView& output);
  std::vector<std::string> fragments;
};

void PrintTo(const RelayoutViolation& violation, std::ostream* out) { *out << violation.name; }

class RelayoutChecks : public ::testing::TestWithParam<RelayoutViolation> {};

TEST_P(RelayoutChecks, ThrowAndWriteNothing) {
  FormatId format = FormatId::kNvfp4;
  ScaleTensor input = make_scales(format, ScaleLayoutId::kLinear, 2, 5, 6);
  ScaleTensor output = make_scales(format, ScaleLayoutId::kSwizzled8x4, 2, 5, 6);
  relayout(format, input.view, output.view);
  const std::vector<uint8_t> before = output.buffer.copy();
  GetParam().apply(format, input.view, output.view);
  expect_error(ErrorKind::kInvalidArgument, GetParam().fragments,
               [&] { relayout(format, input.view, output.view); });
  EXPECT_EQ(before, output.buffer.copy());
}

using V = ScaleView;
INSTANTIATE_TEST_SUITE_P(
    All, RelayoutChecks,
    ::testing::Values(
        RelayoutViolation{
            "format", [](FormatId& f, V&, V&) { f = static_cast<FormatId>(99); }, {"99"}},
        RelayoutViolation{"type",
                          [](FormatId& f, V&, V&) { f = FormatId::kMxfp4; },
                          {"input", "mxfp4", "UE8M0", "E4M3"}},
        RelayoutViolation{"output_type",
                          [](FormatId&, V&, V& o) { o.type = ScaleType::kUE8M0; },
                          {"output", "E4M3", "UE8M0"}},
        RelayoutViolation{"layout",
                          [](FormatId&, V& i, V&) { i.layout = ScaleLayoutId::kMnMajor; },
                          {"input", "mn_major"}},
        RelayoutViolation{
            "batch", [](FormatId&, V& i, V&) { i.batch = -1; }, {"input", "batch", "-1"}},
        RelayoutViolation{"rows", [](FormatId&, V& i, V&) { i.rows = -2; }, {"-2"}},
        RelayoutViolation{"capacity",
                          [](FormatId&, V&, V& o) { o.capacity -= 1; },
                          {"output", "128", "127", "swizzled_8x4"}},
        RelayoutViolation{"huge", [](FormatId&, V& i, V&) { i.rows = INT64_MAX / 2; }, {"2^63"}},
        RelayoutViolation{"null", [](FormatId&, V& i, V&) { i.data = nullptr; }, {"input", "null"}},
        RelayoutViolation{
            "null_output", [](FormatId&, V&, V& o) { o.data = nullptr; }, {"output", "null"}},
        RelayoutViolation{
            "device",
            [](FormatId&, V&, V& o) { o.device = {.type = DeviceType::kCuda, .index = 0}; },
            {"output", "cpu", "cuda:0"}},
        RelayoutViolation{"extents",
                          [](FormatId&, V&, V& o) {
                            o.blocks = 5;
                            o.capacity = 2 * scale_image_size(o.layout, 5, 5);
                          },
                          {"output", "2 x 5 x 6", "2 x 5 x 5"}},
        RelayoutViolation{"in_place",
                          [](FormatId&, V& i, V& o) {
                            o = i;
                            o.data = i.data;
                          },
                          {"output", "overlaps input"}}),
    [](const auto& test) { return test.param.name; });

TEST(Relayout, RefusesDevicesItCannotDoWithEveryCandidatesReason) {
  const ScaleTensor input = make_scales(FormatId::kMxfp4, ScaleLayoutId::kLinear, 1, 5, 6);
  const ScaleTensor output = make_scales(FormatId::kMxfp4, ScaleLayoutId::kSwizzled8x4, 1, 5, 6);
  ScaleView from = input.view;
  ScaleView to = output.view;
  from.device = to.device = {.type = DeviceType::kCuda, .index = 0};
  if (!build_has_cuda()) {
    expect_error(ErrorKind::kUnsupported,
                 {"relayout", "cuda:0", "cpu_baseline", "cpu_reference", "runs on the CPU only"},
                 [&] { relayout(FormatId::kMxfp4, from, to); });
  }
  EXPECT_EQ(output.buffer.copy(), std::vector<uint8_t>(output.buffer.span().size(), 0xCC));
}

TEST(Relayout, AcceptsEmptyScalesWithoutBuffers) {
  for (const ScaleLayoutId layout : layouts_of(FormatId::kNvfp4)) {
    for (const auto& [batch, rows, blocks] :
         {std::array<int64_t, 3>{0, 5, 6}, {1, 0, 6}, {1, 5, 0}}) {
      const ScaleView from{
          .layout = ScaleLayoutId::kLinear, .batch = batch, .rows = rows, .blocks = blocks};
      ScaleView to = from;
      to.layout = layout;
      EXPECT_NO_THROW(relayout(FormatId::kNvfp4, from, to));
    }
  }
}

TEST(Relayout, RefusesMisalignedScalesOnAGpu) {
  const ScaleTensor input = make_scales(FormatId::kMxfp4, ScaleLayoutId::kLinear, 1, 5, 6);
  const ScaleTensor output = make_scales(FormatId::kMxfp4, ScaleLayoutId::kSwizzled8x4, 1, 5, 6);
  ScaleView from = input.view;
  ScaleView to = output.view;
  from.device = to.device = {.type = DeviceType::kCuda, .index = 0};
  ScaleView misaligned = from;
  misaligned.data = input.buffer.data() + 4;
  expect_error(ErrorKind::kInvalidArgument, {"input", "16 bytes", "cuda:0"},
               [&] { relayout(FormatId::kMxfp4, misaligned, to); });
  misaligned = to;
  misaligned.data = output.buffer.data() + 8;
  expect_error(ErrorKind::kInvalidArgument, {"output", "16 bytes", "cuda:0"},
               [&] { relayout(FormatId::kMxfp4, from, misaligned); });
}

TEST(Relayout, RefusesF32ScalesThatAreNotAligned) {
  const ScaleTensor input = make_scales(FormatId::kFp8Block1x128, ScaleLayoutId::kLinear, 1, 5, 6);
  const ScaleTensor output =
      make_scales(FormatId::kFp8Block1x128, ScaleLayoutId::kMnMajor, 1, 5, 6);
  ScaleView to = output.view;
  to.data = output.buffer.data() + 2;
  expect_error(ErrorKind::kInvalidArgument, {"output", "aligned to 4"},
               [&] { relayout(FormatId::kFp8Block1x128, input.view, to); });
}

}  // namespace
}  // namespace narrowfloat::testing
