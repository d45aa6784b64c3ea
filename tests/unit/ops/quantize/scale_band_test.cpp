// Bands of rows store the bytes that rows store one by one: for every length of a run, ragged rows
// and blocks, rows that are missing and a second tensor of scales; and quantizers that use them
// give the oracle's bytes with any number of threads.
#include "ops/quantize/scale_band.h"

#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "ops/quantize/quantize_output.h"
#include "support/environment.h"
#include "support/tensors.h"

namespace narrowfloat::testing {
namespace {

constexpr auto kSwizzled = ScaleLayoutId::kSwizzled128x4;

struct BandShape {
  int64_t batch;
  int64_t rows;
  int64_t blocks;
};

// Two tensors of scales, in memory whose bytes all count.
struct BandOutputs {
  std::vector<uint8_t> scales;
  std::vector<uint8_t> extra;
  QuantizeArgs args;

  BandOutputs(const BandShape& shape, ScaleLayoutId extra_layout)
      : scales(size_of(shape, kSwizzled)), extra(size_of(shape, extra_layout)) {
    args.scales = view(scales, shape, kSwizzled);
    args.extra_scales = view(extra, shape, extra_layout);
  }
  static size_t size_of(const BandShape& shape, ScaleLayoutId layout) {
    return static_cast<size_t>(shape.batch * scale_image_size(layout, shape.rows, shape.blocks));
  }
  static ScaleView view(std::vector<uint8_t>& bytes, const BandShape& shape, ScaleLayoutId layout) {
    return {.data = bytes.data(),
            .type = ScaleType::kE4M3,
            .layout = layout,
            .device = {},
            .batch = shape.batch,
            .rows = shape.rows,
            .blocks = shape.blocks,
            .capacity = static_cast<int64_t>(bytes.size())};
  }
};

QuantizeProblem problem_of(const BandShape& shape) {
  QuantizeProblem problem;
  problem.batch = shape.batch;
  problem.rows = shape.rows;
  return problem;
}

// Every row but each `skipped`-th, in pieces of 128 blocks.
void expect_equal_bytes(const BandShape& shape, ScaleLayoutId extra_layout, int64_t threads,
                        int64_t skipped) {
  BandOutputs expected(shape, extra_layout);
  BandOutputs actual(shape, extra_layout);
  const ScaleBands bands = ScaleBands::of(problem_of(shape), actual.args, threads);
  ASSERT_GT(bands.run, 0);
  std::mt19937 random(7);
  std::vector<int> visits(static_cast<size_t>(shape.rows));
  for (int64_t i = 0; i < shape.batch * bands.per_matrix; ++i) {
    const int64_t batch = i / bands.per_matrix;
    ScaleBand band(actual.args, bands, batch, i % bands.per_matrix);
    for (int64_t index = 0; index < bands.rows(); ++index) {
      const int64_t row = band.row(index);
      if (row >= shape.rows) continue;
      ++visits[static_cast<size_t>(row)];
      if (row % skipped == skipped - 1) continue;
      for (int64_t block = 0; block < shape.blocks; block += 128) {
        std::vector<uint8_t> some(
            static_cast<size_t>(std::min<int64_t>(128, shape.blocks - block)));
        for (uint8_t& scale : some) scale = static_cast<uint8_t>(random());
        band.keep(index, block, some);
        for (const ScaleView& view : {expected.args.scales, expected.args.extra_scales}) {
          store_scales<uint8_t>(view, batch, row, block, some);
        }
      }
    }
    band.store();
  }
  EXPECT_EQ(visits, std::vector<int>(visits.size(), static_cast<int>(shape.batch)));
  EXPECT_TRUE(actual.scales == expected.scales);
  EXPECT_TRUE(actual.extra == expected.extra);
}

TEST(ScaleBand, StoresWhatRowsStore) {
  // Threads and long rows shorten the runs.
  for (const int64_t threads : {1, 2, 5, 16}) {
    for (const BandShape& shape : {BandShape{1, 2048, 64}, BandShape{3, 777, 67},
                                   BandShape{70, 32, 448}, BandShape{2, 1060, 1031}}) {
      for (const auto extra : {ScaleLayoutId::kLinear, ScaleLayoutId::kSwizzled8x4, kSwizzled}) {
        for (const int64_t skipped : {3, 1 << 20}) {
          SCOPED_TRACE(::testing::Message() << threads << " threads, " << shape.rows << " rows, "
                                            << shape.blocks << " blocks");
          expect_equal_bytes(shape, extra, threads, skipped);
        }
      }
    }
  }
}

// A run takes all lengths, and there are no bands where they do not help.
TEST(ScaleBand, RunsAreAsLongAsThreadsAndMemoryAllow) {
  const auto run = [](int64_t threads, const BandShape& shape) {
    BandOutputs outputs(shape, ScaleLayoutId::kLinear);
    return ScaleBands::of(problem_of(shape), outputs.args, threads).run;
  };
  EXPECT_EQ(run(1, {1, 32, 64}), 32);
  EXPECT_EQ(run(1, {1, 31, 64}), 0);
  EXPECT_EQ(run(1, {1, 4096, 60}), 0);
  EXPECT_EQ(run(2, {1, 1024, 256}), 32);
  EXPECT_EQ(run(2, {1, 512, 256}), 16);
  EXPECT_EQ(run(2, {4, 128, 256}), 16);
  EXPECT_EQ(run(2, {1, 128, 256}), 4);
  EXPECT_EQ(run(4, {1, 128, 256}), 0);
  EXPECT_EQ(run(1, {1, 128, 450}), 16);
  EXPECT_EQ(run(1, {1, 128, 4000}), 4);
  EXPECT_EQ(run(1, {1, 128, 4200}), 0);
}

struct BandCase {
  FormatId format;
  DType dtype;
  int64_t rows;
  int64_t cols;
};

TEST(ScaleBand, QuantizersGiveTheOraclesBytes) {
  const std::vector<int32_t> valid_rows{200, 31, 0};
  for (const BandCase& one : {BandCase{FormatId::kNvfp4, DType::kF32, 257, 1040},
                              BandCase{FormatId::kNvfp4PerToken, DType::kBF16, 200, 2064},
                              BandCase{FormatId::kMxfp4, DType::kBF16, 130, 4096},
                              BandCase{FormatId::kMxfp8, DType::kF16, 300, 2080}}) {
    const Matrix input = Matrix::filled(
        {.dtype = one.dtype, .batch = 3, .rows = one.rows, .cols = one.cols}, Fill::kNormalRows, 5);
    const Vector valid = Vector::of(DType::kI32, valid_rows);
    for (const bool is_ragged : {false, true}) {
      QuantizeTo to{.format = one.format, .layout = kSwizzled, .options = {}};
      if (one.format == FormatId::kMxfp8) to.alignment = 128;
      if (is_ragged) to.options.valid_rows = valid.view();
      const auto bytes_with = [&](std::string_view name) {
        const ForcedImplementation forced("quantize", name);
        return bytes_of(quantized(input, to));
      };
      const QuantizedBytes expected = bytes_with("cpu_reference");
      for (const QuantizeImpl& impl : quantize_impls()) {
        if (!impl.supports({}).ok()) continue;
        for (const int threads : {1, 2, 3}) {
          const ThreadLimit limit(threads);
          EXPECT_TRUE(bytes_with(impl.name) == expected)
              << impl.name << ", " << threads << " threads, " << name(one.format);
        }
      }
    }
  }
}

}  // namespace
}  // namespace narrowfloat::testing
