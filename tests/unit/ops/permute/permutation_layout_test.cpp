// Sizes of a permutation's buffers against the worst case found by trying all counts, the binding
// of one buffer, and the default tile.
#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "narrowfloat/permute.h"
#include "support/expect_error.h"

namespace narrowfloat::testing {
namespace {

// The most tiles that up to `slots` slots on `experts` experts can take.
int64_t most_tiles(int64_t slots, int32_t experts, int64_t tile) {
  if (experts == 0) return 0;
  int64_t most = 0;
  for (int64_t here = 0; here <= slots; ++here) {
    const int64_t tiles = (here + tile - 1) / tile;
    most = std::max(most, tiles + most_tiles(slots - here, experts - 1, tile));
  }
  return most;
}

TEST(PermutationLayout, IsExactlyTheWorstCaseOverAllRoutings) {
  for (const int32_t tile : {1, 2, 4, 8}) {
    for (const int32_t experts : {1, 2, 3, 5}) {
      for (int64_t slots = 1; slots <= 12; ++slots) {
        const PermutationLayout layout = permutation_layout(slots, 1, experts, tile);
        EXPECT_EQ(layout.max_tiles, most_tiles(slots, experts, tile))
            << slots << " slots, " << experts << " experts, tile " << tile;
        EXPECT_EQ(layout.max_rows, layout.max_tiles * tile);
      }
    }
  }
}

TEST(PermutationLayout, HasTheSizesOfHandCases) {
  const PermutationLayout layout = permutation_layout(4096, 8, 256, 128);
  // 256 experts with a row each, and 32512 more rows: 254 tiles.
  EXPECT_EQ(layout.max_tiles, 256 + 254);
  EXPECT_EQ(layout.max_rows, 510 * 128);
  EXPECT_EQ(layout.bytes, 4 * (32768 + 2 * 65280 + 2 * 510 + 2));
  const PermutationLayout empty = permutation_layout(0, 8, 256, 64);
  EXPECT_EQ(empty.max_tiles, 0);
  EXPECT_EQ(empty.max_rows, 0);
  EXPECT_EQ(empty.bytes, 8);
  // Fewer slots than experts.
  EXPECT_EQ(permutation_layout(3, 2, 64, 16).max_tiles, 6);
}

TEST(PermutationLayout, CountsIn64BitsUpToTheLimitOfTheIndexes) {
  const PermutationLayout layout = permutation_layout((int64_t{1} << 27) - 1, 8, 1, 2);
  EXPECT_EQ(layout.max_rows, (int64_t{1} << 30) - 8);
  EXPECT_EQ(layout.bytes, 4 * (3 * layout.max_rows + layout.max_rows + 2));
  expect_error(ErrorKind::kInvalidArgument, {"2^31 slots"},
               [] { permutation_layout(int64_t{1} << 28, 8, 1, 1); });
  expect_error(ErrorKind::kInvalidArgument, {"2^31 slots"},
               [] { permutation_layout(std::numeric_limits<int64_t>::max(), 8, 1, 1); });
  // 4096 tiles of 2^19 rows are 2^31 rows.
  expect_error(ErrorKind::kInvalidArgument, {"token_tile", "2147483648"},
               [] { permutation_layout(4096, 1, 4096, 1 << 19); });
  EXPECT_EQ(permutation_layout(4095, 1, 4096, 1 << 19).max_rows, int64_t{4095} << 19);
}

TEST(PermutationLayout, RefusesExtentsOutOfRange) {
  const auto refuses = [](const std::vector<std::string>& fragments, int64_t tokens, int64_t slots,
                          int32_t experts, int32_t tile) {
    expect_error(ErrorKind::kInvalidArgument, fragments,
                 [&] { permutation_layout(tokens, slots, experts, tile); });
  };
  refuses({"tokens", ">= 0", "-1"}, -1, 1, 1, 8);
  refuses({"slots", "at least 1", "0"}, 4, 0, 1, 8);
  refuses({"local_experts", "1 to 4096", "0"}, 4, 1, 0, 8);
  refuses({"local_experts", "1 to 4096", "4097"}, 4, 1, 4097, 8);
  for (const int32_t tile : {0, -8, 3, 12, 192, std::numeric_limits<int32_t>::min()}) {
    refuses({"token_tile", "power of two", std::to_string(tile)}, 4, 1, 1, tile);
  }
}

TEST(PermutationLayout, BindsDisjointViewsThatFillTheBuffer) {
  const PermutationLayout layout = permutation_layout(5, 3, 4, 2);
  std::vector<int32_t> buffer(static_cast<size_t>(layout.bytes) / 4);
  const Permutation maps = layout.bind(buffer.data(), {.type = DeviceType::kCuda, .index = 3});
  EXPECT_EQ(maps.token_tile, 2);
  const std::array views{maps.slot_to_row,    maps.row_to_token, maps.row_to_slot, maps.num_rows,
                         maps.tile_to_expert, maps.tile_row_end, maps.num_tiles};
  const std::array<int64_t, 7> sizes{
      15, layout.max_rows, layout.max_rows, 1, layout.max_tiles, layout.max_tiles, 1};
  std::vector<int> owners(buffer.size(), 0);
  for (size_t i = 0; i < views.size(); ++i) {
    EXPECT_EQ(views[i].num_elements(), sizes[i]);
    EXPECT_EQ(views[i].dtype, DType::kI32);
    EXPECT_EQ(to_string(views[i].device), "cuda:3");
    const auto first = static_cast<size_t>(static_cast<int32_t*>(views[i].data) - buffer.data());
    for (size_t at = first; at < first + static_cast<size_t>(sizes[i]); ++at) ++owners.at(at);
  }
  EXPECT_EQ(owners, std::vector<int>(buffer.size(), 1));
  expect_error(ErrorKind::kInvalidArgument, {"buffer", "null"},
               [&] { (void)layout.bind(nullptr); });
  expect_error(ErrorKind::kInvalidArgument, {"buffer", "aligned to 4"},
               [&] { (void)layout.bind(reinterpret_cast<char*>(buffer.data()) + 2); });
}

TEST(DefaultTokenTile, LeavesRoomAboveTheMeanOfAnExpert) {
  EXPECT_EQ(default_token_tile(0, 8, 256), 8);
  EXPECT_EQ(default_token_tile(1, 8, 256), 8);
  EXPECT_EQ(default_token_tile(128, 8, 256), 8);   // 4 rows on average.
  EXPECT_EQ(default_token_tile(129, 8, 256), 16);  // 5: 8.2
  EXPECT_EQ(default_token_tile(256, 8, 256), 16);  // 8: 12
  EXPECT_EQ(default_token_tile(352, 8, 256), 16);  // 11: 15.7
  EXPECT_EQ(default_token_tile(353, 8, 256), 32);  // 12: 16.9
  EXPECT_EQ(default_token_tile(512, 8, 256), 32);
  EXPECT_EQ(default_token_tile(1024, 8, 256), 64);
  EXPECT_EQ(default_token_tile(2048, 8, 256), 128);
  EXPECT_EQ(default_token_tile(1000000, 8, 256), 128);
  EXPECT_EQ(default_token_tile(18, 1, 1), 32);  // Exactly 18 + sqrt(36) = 24.
  EXPECT_EQ(default_token_tile(24, 1, 1), 32);  // 30.9
  EXPECT_EQ(default_token_tile(25, 1, 1), 64);  // 32.1
  EXPECT_EQ(default_token_tile(std::numeric_limits<int32_t>::max(), 1, 1), 128);
  expect_error(ErrorKind::kInvalidArgument, {"slots"}, [] { default_token_tile(1, 0, 1); });
  expect_error(ErrorKind::kInvalidArgument, {"local_experts"}, [] { default_token_tile(1, 1, 0); });
}

TEST(DefaultTokenTile, NeverMakesABuffersSizeDecreaseAsTokensGrow) {
  for (const int32_t experts : {1, 2, 3, 4, 5, 7, 8, 31, 32, 33, 128, 257, 512}) {
    for (const int64_t slots : {1, 2, 4, 8, 9, 22, 512}) {
      PermutationLayout last = permutation_layout(0, slots, experts, 8);
      for (int64_t tokens = 1; tokens <= 3000; ++tokens) {
        const int32_t tile = default_token_tile(tokens, slots, experts);
        const PermutationLayout layout = permutation_layout(tokens, slots, experts, tile);
        ASSERT_GE(tile, last.token_tile);
        ASSERT_GE(layout.max_rows, last.max_rows)
            << tokens << " tokens of " << slots << " slots, " << experts << " experts";
        last = layout;
      }
    }
  }
}

}  // namespace
}  // namespace narrowfloat::testing
