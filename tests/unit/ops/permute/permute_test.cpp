// The permutation against a model made of std::stable_sort, its properties one by one, and every
// check at its door.
#include <algorithm>
#include <array>
#include <limits>
#include <ostream>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "support/environment.h"
#include "support/expect_error.h"
#include "support/permuted.h"

namespace narrowfloat::testing {
namespace {

using Ints = std::vector<int32_t>;

Ints copy(const TensorView& view) { return {ints(view).begin(), ints(view).end()}; }

// All maps, as values.
struct Maps {
  Ints slot_to_row, row_to_token, row_to_slot, num_rows, tile_to_expert, tile_row_end, num_tiles;
  bool operator==(const Maps&) const = default;
};

Maps maps_of(const Permuted& p) {
  return {copy(p.maps.slot_to_row), copy(p.maps.row_to_token),   copy(p.maps.row_to_slot),
          copy(p.maps.num_rows),    copy(p.maps.tile_to_expert), copy(p.maps.tile_row_end),
          copy(p.maps.num_tiles)};
}

// Sorts the local slots by expert, then deals them out, starting a new tile at each new expert.
Maps model(const IdShape& shape, const Ints& ids) {
  const PermutationLayout layout = layout_of(shape);
  std::vector<size_t> order;
  for (size_t slot = 0; slot < ids.size(); ++slot) {
    if (ids[slot] >= shape.offset && ids[slot] - shape.offset < shape.local) order.push_back(slot);
  }
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return ids[a] < ids[b]; });
  Maps maps;
  maps.slot_to_row.assign(ids.size(), -1);
  for (size_t i = 0; i < order.size(); ++i) {
    const int32_t expert = ids[order[i]];
    const bool is_new = i == 0 || expert != ids[order[i - 1]];
    while (is_new && maps.row_to_slot.size() % static_cast<size_t>(shape.tile) != 0) {
      maps.row_to_slot.push_back(-1);
      maps.row_to_token.push_back(-1);
    }
    if (maps.row_to_slot.size() % static_cast<size_t>(shape.tile) == 0) {
      maps.tile_to_expert.push_back(expert - shape.offset);
      maps.tile_row_end.push_back(0);
    }
    maps.slot_to_row[order[i]] = static_cast<int32_t>(maps.row_to_slot.size());
    maps.row_to_slot.push_back(static_cast<int32_t>(order[i]));
    maps.row_to_token.push_back(static_cast<int32_t>(order[i]) / static_cast<int32_t>(shape.slots));
    maps.tile_row_end.back() = static_cast<int32_t>(maps.row_to_slot.size());
  }
  const auto tiles = static_cast<int32_t>(maps.tile_to_expert.size());
  maps.num_tiles = {tiles};
  maps.num_rows = {tiles * shape.tile};
  maps.row_to_token.resize(static_cast<size_t>(layout.max_rows), -1);
  maps.row_to_slot.resize(static_cast<size_t>(layout.max_rows), -1);
  maps.tile_to_expert.resize(static_cast<size_t>(layout.max_tiles), 0);
  maps.tile_row_end.resize(static_cast<size_t>(layout.max_tiles), 0);
  return maps;
}

TEST(Permute, GivesTheRowsOfAHandCase) {
  // Local experts 1, 2, 3 of 5; tiles of 2.
  const IdShape shape{.tokens = 4, .slots = 2, .experts = 5, .offset = 1, .local = 3, .tile = 2};
  const Permuted p(shape, {3, 1,  //
                           1, 4,  //
                           0, 1,  //
                           -1, 3});
  EXPECT_EQ(p.layout.max_tiles, 3 + 5 / 2);
  // Expert 1 has slots 1, 2, 5 and a row of padding, expert 2 nothing, expert 3 slots 0 and 7.
  EXPECT_EQ(copy(p.maps.slot_to_row), (Ints{4, 0, 1, -1, -1, 2, -1, 5}));
  EXPECT_EQ(copy(p.maps.row_to_slot), (Ints{1, 2, 5, -1, 0, 7, -1, -1, -1, -1}));
  EXPECT_EQ(copy(p.maps.row_to_token), (Ints{0, 1, 2, -1, 0, 3, -1, -1, -1, -1}));
  EXPECT_EQ(p.num_rows(), 6);
  EXPECT_EQ(p.num_tiles(), 3);
  EXPECT_EQ(copy(p.maps.tile_to_expert), (Ints{0, 0, 2, 0, 0}));
  EXPECT_EQ(copy(p.maps.tile_row_end), (Ints{2, 3, 6, 0, 0}));
  EXPECT_TRUE(p.buffer.intact());
}

TEST(Permute, KeepsDuplicatesOfATokenInSlotOrder) {
  const IdShape shape{.tokens = 2, .slots = 3, .experts = 2, .local = 2, .tile = 4};
  const Permuted p(shape, {1, 1, 1, 0, 1, 0});
  EXPECT_EQ(copy(p.maps.slot_to_row), (Ints{4, 5, 6, 0, 7, 1}));
  EXPECT_EQ(p.num_rows(), 8);
}

TEST(Permute, WritesEmptyCountsForNoTokens) {
  const IdShape shape{.tokens = 0, .slots = 8, .experts = 256, .local = 256, .tile = 64};
  const Permuted p(shape, Ints{});
  EXPECT_EQ(p.num_rows(), 0);
  EXPECT_EQ(p.num_tiles(), 0);
  EXPECT_TRUE(p.buffer.intact());
}

TEST(Permute, GivesNoRowsWhereNoExpertIsLocal) {
  const IdShape shape{.tokens = 9, .slots = 2, .experts = 8, .offset = 4, .local = 2, .tile = 8};
  const Permuted p(shape, Ints(18, 3));
  EXPECT_EQ(p.num_rows(), 0);
  EXPECT_EQ(copy(p.maps.slot_to_row), Ints(18, -1));
  EXPECT_EQ(copy(p.maps.row_to_slot), Ints(static_cast<size_t>(p.layout.max_rows), -1));
  EXPECT_EQ(copy(p.maps.tile_row_end), Ints(static_cast<size_t>(p.layout.max_tiles), 0));
}

// Shapes on all sides of the tile, shards, shared experts as the last local ones, and batches that
// the parallel form cuts into chunks.
std::vector<IdShape> shapes() {
  std::vector<IdShape> all;
  for (const int64_t tokens : {1, 2, 7, 8, 63, 65, 130}) {
    for (const int32_t tile : {1, 4, 8, 64, 128}) {
      all.push_back({tokens, 1, 3, 0, 3, tile});
      all.push_back({tokens, 8, 32, 0, 32, tile});
      all.push_back({tokens, 5, 33, 32, 1, tile});
      all.push_back({tokens, 4, 256, 7, 31, tile});
      all.push_back({tokens, 3, 1, 0, 1, tile});
    }
  }
  all.push_back({5000, 8, 256, 0, 256, 64});
  all.push_back({6001, 9, 257, 0, 257, 128});
  all.push_back({6001, 7, 256, 5, 251, 16});
  all.push_back({20000, 3, 4096, 0, 4096, 8});
  all.push_back({40000, 1, 4096, 4095, 1, 32});
  return all;
}

class PermuteSpread : public ::testing::TestWithParam<int> {
 protected:
  static IdSpread spread() { return static_cast<IdSpread>(GetParam()); }

  // body(shape, ids, permuted) over all shapes.
  template <typename Body>
  static void for_each(const Body& body) {
    Random random(static_cast<uint64_t>(GetParam()));
    for (const IdShape& shape : shapes()) {
      const Ints ids = expert_ids(spread(), shape, random);
      const Permuted permuted(shape, ids);
      SCOPED_TRACE(fmt::format("{}x{} slots, {} experts, local {} from {}, tile {}", shape.tokens,
                               shape.slots, shape.experts, shape.local, shape.offset, shape.tile));
      EXPECT_TRUE(permuted.buffer.intact());
      body(shape, ids, permuted);
      if (HasFailure()) return;
    }
  }
};

TEST_P(PermuteSpread, EqualsTheStableSort) {
  for_each([](const IdShape& shape, const Ints& ids, const Permuted& permuted) {
    EXPECT_TRUE(model(shape, ids) == maps_of(permuted));
  });
}

// The properties that a caller may rely on whatever the order within an expert: range, uniqueness,
// round trip, segments, counts (moe spec 5.1).
TEST_P(PermuteSpread, HasThePropertiesThatCallersRelyOn) {
  for_each([](const IdShape& shape, const Ints& ids, const Permuted& p) {
    const auto slot_to_row = ints(p.maps.slot_to_row);
    const auto row_to_slot = ints(p.maps.row_to_slot);
    const auto row_to_token = ints(p.maps.row_to_token);
    ASSERT_EQ(p.num_rows(), p.num_tiles() * shape.tile);
    ASSERT_LE(p.num_rows(), p.layout.max_rows);
    Ints counts(static_cast<size_t>(shape.local), 0);
    int64_t num_local = 0;
    for (size_t slot = 0; slot < ids.size(); ++slot) {
      const int64_t expert = int64_t{ids[slot]} - shape.offset;
      const int32_t row = slot_to_row[slot];
      if (expert < 0 || expert >= shape.local) {
        ASSERT_EQ(row, -1);
        continue;
      }
      ++num_local;
      ++counts[static_cast<size_t>(expert)];
      ASSERT_TRUE(row >= 0 && row < p.num_rows());
      // The round trip makes rows unique.
      ASSERT_EQ(row_to_slot[static_cast<size_t>(row)], static_cast<int64_t>(slot));
      const auto tile = static_cast<size_t>(row / shape.tile);
      ASSERT_EQ(ints(p.maps.tile_to_expert)[tile], expert);
      ASSERT_LT(row, ints(p.maps.tile_row_end)[tile]);
    }
    int64_t used = 0;
    for (size_t row = 0; row < row_to_slot.size(); ++row) {
      ASSERT_EQ(row_to_slot[row] < 0 ? -1 : row_to_slot[row] / shape.slots, row_to_token[row]);
      used += row_to_slot[row] >= 0 ? 1 : 0;
    }
    ASSERT_EQ(used, num_local);
    int32_t tiles = 0;
    for (const int32_t count : counts) tiles += (count + shape.tile - 1) / shape.tile;
    ASSERT_EQ(p.num_tiles(), tiles);
  });
}

TEST_P(PermuteSpread, DoesNotDependOnThreadsPoisonOrImplementation) {
  Random random(77);
  const IdShape shape{.tokens = 7001, .slots = 8, .experts = 80, .offset = 8, .local = 64};
  const Ints ids = expert_ids(spread(), shape, random);
  const Permuted expected(shape, ids);
  for (const int threads : {1, 2, 5}) {
    const ThreadLimit limit(threads);
    const Permuted again(shape, ids, 0x00);
    EXPECT_EQ(again.buffer.copy(), expected.buffer.copy());
  }
  const ForcedImplementation forced("permute", "cpu_reference");
  EXPECT_EQ(Permuted(shape, ids).buffer.copy(), expected.buffer.copy());
}

INSTANTIATE_TEST_SUITE_P(All, PermuteSpread, ::testing::Range(0, kNumIdSpreads),
                         [](const auto& test) {
                           return std::string(name(static_cast<IdSpread>(test.param)));
                         });

// Shards of one routing have the segments of the whole, in order (moe spec 4.6).
TEST(Permute, SplitsIntoShards) {
  Random random(3);
  const IdShape whole{.tokens = 300, .slots = 6, .experts = 48, .local = 48, .tile = 16};
  const Ints ids = expert_ids(IdSpread::kZipf, whole, random);
  const Permuted all(whole, ids);
  int32_t base = 0;
  for (const auto& [offset, local] : {std::pair{0, 7}, {7, 1}, {8, 40}}) {
    IdShape shard = whole;
    shard.offset = offset;
    shard.local = local;
    const Permuted part(shard, ids);
    for (int32_t row = 0; row < part.num_rows(); ++row) {
      EXPECT_EQ(ints(part.maps.row_to_slot)[static_cast<size_t>(row)],
                ints(all.maps.row_to_slot)[static_cast<size_t>(base + row)]);
    }
    base += part.num_rows();
  }
  EXPECT_EQ(base, all.num_rows());
}

// A call with one thing wrong.
struct PermuteCall {
  TensorView ids;
  int32_t expert_offset = 2;
  int32_t local_experts = 4;
  Permutation maps;
};
struct PermuteViolation {
  const char* name;
  void (*apply)(PermuteCall& call);
  std::vector<std::string> fragments;
};
void PrintTo(const PermuteViolation& violation, std::ostream* out) { *out << violation.name; }

template <TensorView Permutation::*kView>
void one_more(PermuteCall& call) {
  ++(call.maps.*kView).shape[0];
}

std::vector<PermuteViolation> permute_violations() {
  return {
      {"IdsType", [](PermuteCall& c) { c.ids.dtype = DType::kI64; }, {"ids", "I32", "I64"}},
      {"IdsRank",
       [](PermuteCall& c) { c.ids = TensorView::contiguous(c.ids.data, DType::kI32, {10}); },
       {"ids", "[tokens, slots]", "I32[10]"}},
      {"IdsGap", [](PermuteCall& c) { c.ids.strides[0] = 3; }, {"ids", "dense", "3"}},
      {"IdsNull", [](PermuteCall& c) { c.ids.data = nullptr; }, {"ids", "null"}},
      {"IdsExtent", [](PermuteCall& c) { c.ids.shape[0] = -1; }, {"ids", "extents >= 0"}},
      {"NoSlots", [](PermuteCall& c) { c.ids.shape[1] = 0; }, {"slots", "at least 1", "0"}},
      {"Tile", [](PermuteCall& c) { c.maps.token_tile = 6; }, {"token_tile", "power of two", "6"}},
      {"OffsetNegative", [](PermuteCall& c) { c.expert_offset = -1; }, {"expert_offset", "-1"}},
      {"OffsetLarge",
       [](PermuteCall& c) { c.expert_offset = 4093; },
       {"expert_offset", "0 to 4092"}},
      {"NoExperts",
       [](PermuteCall& c) { c.local_experts = 0; },
       {"local_experts", "1 to 4096", "0"}},
      {"OtherExperts",
       [](PermuteCall& c) { c.local_experts = 3; },
       {"permutation.row_to_token", "16 values", "I32[20]"}},
      {"SlotToRow", one_more<&Permutation::slot_to_row>, {"slot_to_row", "10 values", "I32[11]"}},
      {"RowToToken", one_more<&Permutation::row_to_token>, {"row_to_token", "20 values"}},
      {"RowToSlot", one_more<&Permutation::row_to_slot>, {"row_to_slot", "20 values"}},
      {"NumRows", one_more<&Permutation::num_rows>, {"num_rows", "1 values", "I32[2]"}},
      {"TileToExpert", one_more<&Permutation::tile_to_expert>, {"tile_to_expert", "5 values"}},
      {"TileRowEnd", one_more<&Permutation::tile_row_end>, {"tile_row_end", "5 values"}},
      {"NumTiles", one_more<&Permutation::num_tiles>, {"num_tiles", "1 values"}},
      {"MapType",
       [](PermuteCall& c) { c.maps.tile_row_end.dtype = DType::kU32; },
       {"tile_row_end", "I32", "U32"}},
      {"MapDevice",
       [](PermuteCall& c) { c.maps.row_to_slot.device.type = DeviceType::kCuda; },
       {"row_to_slot", "cpu", "cuda:0"}},
      {"MapsOverlap",
       [](PermuteCall& c) { c.maps.row_to_slot.data = c.maps.row_to_token.data; },
       {"row_to_token", "overlaps", "row_to_slot"}},
      {"IdsOverlap",
       [](PermuteCall& c) { c.maps.slot_to_row.data = c.ids.data; },
       {"slot_to_row", "overlaps", "ids"}},
  };
}

class PermuteChecks : public ::testing::TestWithParam<PermuteViolation> {};

TEST_P(PermuteChecks, ThrowAndWriteNothing) {
  const IdShape shape{.tokens = 5, .slots = 2, .experts = 8, .offset = 2, .local = 4, .tile = 4};
  const Permuted p(shape, 0xCC);
  Ints ids(10, 3);
  PermuteCall call{.ids = TensorView::contiguous(ids.data(), DType::kI32, {5, 2}), .maps = p.maps};
  GetParam().apply(call);
  expect_error(ErrorKind::kInvalidArgument, GetParam().fragments,
               [&] { permute(call.ids, call.expert_offset, call.local_experts, call.maps); });
  EXPECT_EQ(p.buffer.copy(), std::vector<uint8_t>(static_cast<size_t>(p.layout.bytes), 0xCC));
  EXPECT_EQ(ids, Ints(10, 3));
}

INSTANTIATE_TEST_SUITE_P(All, PermuteChecks, ::testing::ValuesIn(permute_violations()),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(Permute, HasNoImplementationForAnotherDevice) {
  if (build_has_cuda()) GTEST_SKIP() << "this build has implementations for CUDA";
  const IdShape shape{.tokens = 1, .slots = 1};
  const Device cuda{.type = DeviceType::kCuda};
  Permuted p(shape);
  const int32_t id = 0;
  expect_error(ErrorKind::kUnsupported, {"permute", "1x1 slots", "cpu_baseline", "CPU only"}, [&] {
    permute(TensorView::contiguous(&id, DType::kI32, {1, 1}, cuda), 0, 1,
            p.layout.bind(p.buffer.data(), cuda));
  });
}

}  // namespace
}  // namespace narrowfloat::testing
