// Every implementation of the row shuffles, against positions from the specification's map of old
// to new rows (spec 8.7), with rows of any width and stride.
#include <cstring>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "conformance/case_sampling.h"
#include "conformance/coverage.h"
#include "ops/shuffle/shuffle_problem.h"
#include "support/environment.h"
#include "support/guarded_buffer.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kShuffleCases = 60;

// A group of 16 and one of 32 as the specification's formulas move them.
int64_t moved_row(int64_t row, int64_t tile) {
  if (tile % 128 == 0) return row / 32 * 32 + row % 32 % 4 * 8 + row % 32 / 4;
  return row / 16 * 16 + row % 16 % 2 * 8 + row % 16 / 2;
}

void fill(const GuardedBuffer& buffer, Random& random) {
  for (uint8_t& byte : buffer.span()) byte = static_cast<uint8_t>(random.bits());
}

// A call on the device under test with every implementation for it.
template <typename Call>
void for_implementations(Coverage& coverage, const std::string& what, int64_t index,
                         const Call& call) {
  for (const ShuffleImpl& impl : shuffle_impls()) {
    if (!is_for_device(impl.name)) continue;
    const std::string note = fmt::format("{}\n  {}", repro_line("shuffle", impl.name, index), what);
    set_crash_note(note.c_str());
    const ForcedImplementation forced("shuffle", impl.name);
    SCOPED_TRACE(note);
    call();
    coverage.ran(impl.name);
  }
  coverage.end_case(true, what);
}

class ShuffleConformance : public DeviceTest<bool> {};

TEST_P(ShuffleConformance, EveryImplementationMovesEveryRow) {
  const bool is_inverse = GetParam();
  Coverage coverage;
  for_cases(kShuffleCases, [&](int64_t index) {
    Random random(case_seed(is_inverse ? "unshuffle rows" : "shuffle rows", index));
    const int64_t tile = random.pick<int64_t>({1, 64, 128, 192, 256});
    const int64_t group = tile % 128 == 0 ? 32 : 16;
    const DType dtype = random.pick<DType>({DType::kU8, DType::kBF16, DType::kF32, DType::kI64});
    const int64_t width = bits(dtype) / 8;
    const int64_t batch = random.range(0, 3);
    const int64_t rows = random.range(0, 5) * group;
    const int64_t cols = random.chance(50) ? random.range(0, 20) : random.pick<int64_t>({64, 257});
    const int64_t stride = cols + (random.chance(40) ? random.range(1, 20) : 0);
    const int64_t misalignment = random.chance(30) ? width * random.range(1, 15) : 0;
    const auto what =
        fmt::format("{} {}x{}x{} stride {} tile {}", name(dtype), batch, rows, cols, stride, tile);
    for_implementations(coverage, what, index, [&] {
      for (const Guard guard : {Guard::kCanary, Guard::kPage}) {
        const BufferStyle style{.guard = guard, .misalignment = misalignment};
        // The last row ends where the memory does.
        const int64_t all_rows = batch * rows;
        const int64_t size = all_rows == 0 ? 0 : ((all_rows - 1) * stride + cols) * width;
        const GuardedBuffer input(size, style);
        const GuardedBuffer output(all_rows * cols * width, style);
        fill(input, random);
        const std::vector<uint8_t> before = input.copy();
        TensorView from = TensorView::contiguous(input.data(), dtype, {batch, rows, cols});
        from.strides = {rows * stride, stride, 1};
        const TensorView to = TensorView::contiguous(output.data(), dtype, {batch, rows, cols});
        const DeviceCopies device(
            {&input, &output}, {.alignment = width, .programmatic_launch = guard == Guard::kPage});
        (is_inverse ? unshuffle_rows : shuffle_rows)(device.view(from), device.view(to), tile,
                                                     device.stream());
        EXPECT_TRUE(device.take_back());
        EXPECT_TRUE(input.intact() && output.intact());
        EXPECT_EQ(before, input.copy());
        for (int64_t row = 0; row < all_rows && cols > 0; ++row) {
          const int64_t moved = moved_row(row, tile);
          const int64_t in = is_inverse ? moved : row;
          const int64_t out = is_inverse ? row : moved;
          ASSERT_EQ(
              0, std::memcmp(input.data() + in * stride * width, output.data() + out * cols * width,
                             static_cast<size_t>(cols * width)))
              << "row " << row;
        }
      }
    });
  });
  coverage.report("rows");
}

ScaleView scale_view(const GuardedBuffer& buffer, ScaleLayoutId layout, int64_t batch, int64_t rows,
                     int64_t blocks) {
  return {.data = buffer.data(),
          .layout = layout,
          .batch = batch,
          .rows = rows,
          .blocks = blocks,
          .capacity = buffer.size()};
}

constexpr auto kLinear = ScaleLayoutId::kLinear;
constexpr auto kSwizzled = ScaleLayoutId::kSwizzled128x4;

struct ScaleCase {
  int64_t batch;
  int64_t rows;
  int64_t blocks;
  int64_t tile;
};

// Position in the shuffled scales of scale i of the plain ones.
int64_t shuffled_position(const ScaleCase& c, int64_t i) {
  const int64_t row = i / c.blocks % c.rows;
  return i / c.blocks / c.rows * scale_image_size(kSwizzled, c.rows, c.blocks) +
         scale_offset(kSwizzled, moved_row(row, c.tile), i % c.blocks, c.rows, c.blocks);
}

void check_scales(const ScaleCase& c, bool is_inverse, Guard guard, Random& random) {
  const int64_t count = c.batch * c.rows * c.blocks;
  const GuardedBuffer plain(count, {.guard = guard});
  const GuardedBuffer shuffled(c.batch * scale_image_size(kSwizzled, c.rows, c.blocks),
                               {.guard = guard});
  fill(is_inverse ? shuffled : plain, random);
  const DeviceCopies device({&plain, &shuffled}, {.programmatic_launch = guard == Guard::kPage});
  const ScaleView linear = device.view(scale_view(plain, kLinear, c.batch, c.rows, c.blocks));
  const ScaleView swizzled =
      device.view(scale_view(shuffled, kSwizzled, c.batch, c.rows, c.blocks));
  if (is_inverse) {
    unshuffle_scales(FormatId::kNvfp4, swizzled, linear, c.tile, device.stream());
  } else {
    shuffle_scales(FormatId::kNvfp4, linear, swizzled, c.tile, device.stream());
  }
  EXPECT_TRUE(device.take_back());
  EXPECT_TRUE(plain.intact() && shuffled.intact());
  // The padding of shuffled scales is zero.
  std::vector<uint8_t> expected(static_cast<size_t>(is_inverse ? count : shuffled.size()), 0);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = shuffled_position(c, i);
    if (is_inverse) {
      expected[static_cast<size_t>(i)] = shuffled.data()[at];
    } else {
      expected[static_cast<size_t>(at)] = plain.data()[i];
    }
  }
  EXPECT_EQ(expected, (is_inverse ? plain : shuffled).copy());
}

TEST_P(ShuffleConformance, EveryImplementationMovesEveryScale) {
  const bool is_inverse = GetParam();
  Coverage coverage;
  for_cases(kShuffleCases, [&](int64_t index) {
    Random random(case_seed(is_inverse ? "unshuffle scales" : "shuffle scales", index));
    const ScaleCase c{.batch = random.range(0, 3),
                      .rows = random.range(0, 3) * 128,
                      .blocks = random.chance(70) ? random.range(0, 20) : random.range(0, 70),
                      .tile = random.pick<int64_t>({64, 128})};
    const auto what = fmt::format("scales {}x{}x{} tile {}", c.batch, c.rows, c.blocks, c.tile);
    for_implementations(coverage, what, index, [&] {
      for (const Guard guard : {Guard::kCanary, Guard::kPage}) {
        check_scales(c, is_inverse, guard, random);
      }
    });
  });
  coverage.report("scales");
}

INSTANTIATE_TEST_SUITE_P(All, ShuffleConformance, ::testing::Bool(), [](const auto& test) {
  return std::string(test.param ? "back" : "forth");
});

}  // namespace
}  // namespace narrowfloat::testing
