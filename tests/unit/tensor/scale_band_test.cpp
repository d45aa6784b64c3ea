// Bands of rows store and load the bytes that a matrix has in swizzled_128x4: for every length of a
// run, ragged rows and blocks, and rows that are missing.
#include "tensor/scale_band.h"

#include <algorithm>
#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace narrowfloat {
namespace {

using Layout = Swizzled128x4Layout;

// Scales of matrices, in memory whose bytes all count.
struct BandTensor {
  std::vector<uint8_t> bytes;
  ScaleView view;

  explicit BandTensor(const BandedScales& scales)
      : bytes(static_cast<size_t>(scales.batch *
                                  scale_image_size(Layout::kId, scales.rows, scales.blocks))),
        view{.data = bytes.data(),
             .type = ScaleType::kE4M3,
             .layout = Layout::kId,
             .device = {},
             .batch = scales.batch,
             .rows = scales.rows,
             .blocks = scales.blocks,
             .capacity = static_cast<int64_t>(bytes.size())} {}
  uint8_t& at(int64_t batch, int64_t row, int64_t block) {
    return bytes[static_cast<size_t>(batch * (view.capacity / view.batch) +
                                     Layout::offset(row, block, {view.rows, view.blocks}))];
  }
};

// Calls visitor(band, batch) for all bands, each with arbitrary contents.
template <typename Visitor>
void for_bands(const BandedScales& scales, int64_t threads, const Visitor& visitor) {
  const ScaleBands bands = ScaleBands::of(scales, threads);
  ASSERT_GT(bands.run, 0);
  for (int64_t i = 0; i < scales.batch * bands.per_matrix; ++i) {
    ScaleBand band(bands, scales.blocks, i % bands.per_matrix);
    for (int64_t index = 0; index < bands.rows(); ++index) {
      std::fill_n(band.scales_of(index), scales.blocks, uint8_t{0xCC});
    }
    visitor(band, i / bands.per_matrix, bands.rows());
  }
}

// Stores every row but each `skipped`-th, in pieces of 128 blocks, without the last `missing`.
void expect_stored(const BandedScales& scales, int64_t threads, int64_t skipped, int64_t missing) {
  BandTensor expected(scales);
  BandTensor actual(scales);
  // Padding is stored, too.
  std::fill(actual.bytes.begin(), actual.bytes.end(), uint8_t{0xEE});
  std::mt19937 random(7);
  std::vector<int> visits(static_cast<size_t>(scales.rows));
  for_bands(scales, threads, [&](ScaleBand& band, int64_t batch, int64_t rows) {
    for (int64_t index = 0; index < rows; ++index) {
      const int64_t row = band.row(index);
      if (row >= scales.rows) continue;
      ++visits[static_cast<size_t>(row)];
      if (row % skipped == skipped - 1) continue;
      const int64_t blocks = scales.blocks - missing;
      for (int64_t block = 0; block < blocks; block += 128) {
        std::vector<uint8_t> some(static_cast<size_t>(std::min<int64_t>(128, blocks - block)));
        for (size_t i = 0; i < some.size(); ++i) {
          some[i] = static_cast<uint8_t>(random());
          expected.at(batch, row, block + static_cast<int64_t>(i)) = some[i];
        }
        band.keep(index, block, some);
      }
    }
    band.clear_others();
    band.store(actual.view, batch);
  });
  EXPECT_EQ(visits, std::vector<int>(visits.size(), static_cast<int>(scales.batch)));
  EXPECT_TRUE(actual.bytes == expected.bytes);
}

void expect_loaded(const BandedScales& scales, int64_t threads) {
  BandTensor tensor(scales);
  std::mt19937 random(8);
  for (uint8_t& scale : tensor.bytes) scale = static_cast<uint8_t>(random());
  int64_t differences = 0;
  for_bands(scales, threads, [&](ScaleBand& band, int64_t batch, int64_t rows) {
    band.load(tensor.view, batch);
    for (int64_t index = 0; index < rows; ++index) {
      const int64_t row = band.row(index);
      for (int64_t block = 0; row < scales.rows && block < scales.blocks; ++block) {
        differences += band.scales_of(index)[block] != tensor.at(batch, row, block) ? 1 : 0;
      }
    }
  });
  EXPECT_EQ(differences, 0);
}

TEST(ScaleBand, StoresAndLoadsWhatTheLayoutSays) {
  // Threads and long rows shorten the runs.
  for (const int64_t threads : {1, 2, 5, 16}) {
    for (const BandedScales& scales : {BandedScales{1, 2048, 64}, BandedScales{3, 777, 67},
                                       BandedScales{70, 129, 448}, BandedScales{2, 1060, 1031}}) {
      SCOPED_TRACE(::testing::Message() << threads << " threads, " << scales.rows << " rows, "
                                        << scales.blocks << " blocks");
      expect_stored(scales, threads, 1 << 20, 0);
      expect_stored(scales, threads, 3, 0);
      expect_stored(scales, threads, 5, 3);
      expect_loaded(scales, threads);
    }
  }
}

TEST(ScaleBand, RunsAreAsLongAsThreadsAndMemoryAllow) {
  const auto run = [](int64_t threads, const BandedScales& scales) {
    return ScaleBands::of(scales, threads).run;
  };
  EXPECT_EQ(run(1, {1, 128, 64}), 32);
  EXPECT_EQ(run(1, {1, 127, 64}), 0);
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

}  // namespace
}  // namespace narrowfloat
