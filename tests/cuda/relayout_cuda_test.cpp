// relayout() on a GPU: scales of real models and odd ones between all layouts, and more than 2^31
// scales.
#include <algorithm>
#include <array>
#include <cstring>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "cuda/gpu_test.h"
#include "cuda/random_bytes.h"
#include "narrowfloat/quantize.h"
#include "support/device_buffer.h"
#include "support/device_copies.h"

namespace narrowfloat::testing {
namespace {

class RelayoutCuda : public GpuTest {};

struct ScaleShape {
  FormatId format;
  int64_t batch;
  int64_t rows;
  int64_t blocks;
};

ScaleView view_of(const ScaleShape& shape, ScaleLayoutId layout, void* data, Device device = {}) {
  return {.data = data,
          .type = format_info(shape.format).scale_type,
          .layout = layout,
          .device = device,
          .batch = shape.batch,
          .rows = shape.rows,
          .blocks = shape.blocks,
          .capacity = shape.batch * scale_image_size(layout, shape.rows, shape.blocks)};
}

GuardedBuffer buffer_of(const ScaleShape& shape, ScaleLayoutId layout, uint8_t poison = 0xCC) {
  const ScaleView view = view_of(shape, layout, nullptr);
  return {view.capacity * bytes(view.type), {.poison = poison}};
}

void expect_equal_on_gpu(const ScaleShape& shape, ScaleLayoutId from, ScaleLayoutId to) {
  const GuardedBuffer input = buffer_of(shape, from);
  random_bytes(input.span(), 11);
  const GuardedBuffer expected = buffer_of(shape, to);
  const GuardedBuffer actual = buffer_of(shape, to, 0x5A);
  relayout(shape.format, view_of(shape, from, input.data()), view_of(shape, to, expected.data()));
  const DeviceCopies copies({&input, &actual}, {.programmatic_launch = true});
  relayout(shape.format, copies.view(view_of(shape, from, input.data())),
           copies.view(view_of(shape, to, actual.data())), copies.stream());
  const std::string what = fmt::format("{} {}x{}x{} {} -> {}", name(shape.format), shape.batch,
                                       shape.rows, shape.blocks, name(from), name(to));
  EXPECT_TRUE(copies.take_back()) << what << ": a canary was overwritten";
  EXPECT_TRUE(std::ranges::equal(expected.span(), actual.span())) << what;
}

TEST_F(RelayoutCuda, LargeImagesBetweenAllLayouts) {
  constexpr std::array kByteLayouts{ScaleLayoutId::kLinear, ScaleLayoutId::kSwizzled128x4,
                                    ScaleLayoutId::kSwizzled8x4};
  constexpr std::array kF32Layouts{ScaleLayoutId::kLinear, ScaleLayoutId::kMnMajor};
  for (const int64_t batch : {1, 3}) {
    for (const int64_t rows : {1, 129, 4096, 5000}) {
      for (const int64_t blocks : {1, 33, 57, 64, 180, 448}) {
        for (const ScaleLayoutId from : kByteLayouts) {
          for (const ScaleLayoutId to : kByteLayouts) {
            expect_equal_on_gpu({FormatId::kNvfp4, batch, rows, blocks}, from, to);
          }
        }
        for (const ScaleLayoutId from : kF32Layouts) {
          for (const ScaleLayoutId to : kF32Layouts) {
            expect_equal_on_gpu({FormatId::kFp8Block1x128, batch, rows, blocks}, from, to);
          }
        }
        if (HasFailure()) return;
      }
    }
  }
}

// There and back; on the way the first tiles, those around position 2^31 and the last, with their
// padding.
TEST_F(RelayoutCuda, MoreThanTwoToThe31Scales) {
  constexpr ScaleShape kShape{FormatId::kNvfp4, 1, 5000001, 448};
  constexpr int64_t kTileRowBytes = 128 * kShape.blocks;
  if (free_device_memory() < int64_t{6} << 30) GTEST_SKIP() << "skipped: needs 6 GiB of memory";
  const GuardedBuffer linear = buffer_of(kShape, ScaleLayoutId::kLinear);
  random_bytes(linear.span(), 13);
  const DeviceBuffer input(linear.size());
  input.write(linear.data(), linear.size());
  const ScaleView from = view_of(kShape, ScaleLayoutId::kLinear, input.data(), gpu());
  ScaleView to = view_of(kShape, ScaleLayoutId::kSwizzled128x4, nullptr, gpu());
  const DeviceBuffer swizzled(to.capacity);
  to.data = swizzled.data();
  relayout(kShape.format, from, to);
  const int64_t last = kShape.rows / 128;
  for (const int64_t tile : {int64_t{0}, (int64_t{1} << 31) / kTileRowBytes, last}) {
    const ScaleShape part{kShape.format, 1, std::min<int64_t>(128, kShape.rows - tile * 128),
                          kShape.blocks};
    const GuardedBuffer expected = buffer_of(part, ScaleLayoutId::kSwizzled128x4);
    relayout(part.format,
             view_of(part, ScaleLayoutId::kLinear, linear.data() + tile * kTileRowBytes),
             view_of(part, ScaleLayoutId::kSwizzled128x4, expected.data()));
    std::vector<uint8_t> actual(static_cast<size_t>(kTileRowBytes));
    swizzled.read(actual.data(), kTileRowBytes, tile * kTileRowBytes);
    EXPECT_EQ(expected.copy(), actual) << "tile " << tile;
  }
  input.fill(0xCC);
  relayout(kShape.format, to, from);
  const GuardedBuffer back = buffer_of(kShape, ScaleLayoutId::kLinear);
  input.read(back.data(), back.size());
  EXPECT_TRUE(std::ranges::equal(linear.span(), back.span()));
  EXPECT_TRUE(input.intact() && swizzled.intact());
}

}  // namespace
}  // namespace narrowfloat::testing
