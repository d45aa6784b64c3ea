// Sizes and offsets of workspaces, also of absurd ones.
#include "comm/workspace_layout.h"

#include <gtest/gtest.h>

#include "comm/leaf.h"
#include "support/expect_error.h"

namespace narrowfloat {
namespace {

using testing::expect_error;
using testing::kInvalid;

constexpr int64_t kMiB = 1 << 20;

TEST(PeerRegion, HasItsPartsOneAfterAnother) {
  for (int ranks = 1; ranks <= kMaxRanks; ++ranks) {
    for (const int64_t capacity : {0L, 1L, 127L, 128L, 129L, 5 * kMiB}) {
      const PeerRegion region = peer_region(ranks, {capacity, 2 * capacity});
      EXPECT_EQ(region.abort, 0);
      EXPECT_GE(region.barriers, kControlLine);
      EXPECT_GE(region.control, region.barriers + kMostCtas * kControlLine);
      EXPECT_GE(region.oneshot, region.control + int64_t{sizeof(LocalControl)});
      EXPECT_GE(region.slot_capacity, capacity);
      EXPECT_LT(region.slot_capacity, capacity + kControlLine);
      EXPECT_EQ(region.staging, region.oneshot + 3 * ranks * region.slot_capacity);
      EXPECT_GE(region.area_bytes, 2 * capacity + (ranks - 1) * int64_t{sizeof(Leaf32)});
      EXPECT_EQ(region.result, region.staging + 2 * region.area_bytes);
      EXPECT_EQ(region.size_bytes, region.result + region.area_bytes);
      for (const int64_t part : {region.barriers, region.control, region.oneshot, region.staging,
                                 region.result, region.size_bytes}) {
        EXPECT_EQ(part % kControlLine, 0);
      }
      EXPECT_EQ(allreduce_workspace_bytes(ranks, {capacity, 2 * capacity}), region.size_bytes);
    }
  }
}

// 12 MiB + 96 MiB, 3 + 96 and 3 + 96, beside the control words.
TEST(AllReduceCapacities, HaveTheDefaultsOfTheDocumentation) {
  const auto size = [](int ranks) {
    return allreduce_workspace_bytes(ranks, default_allreduce_capacities(ranks)) / kMiB;
  };
  EXPECT_EQ(size(2), 12 + 96);
  EXPECT_EQ(size(4), 3 + 96);
  EXPECT_EQ(size(8), 3 + 96);
  EXPECT_EQ(default_allreduce_capacities(3).oneshot_bytes, kMiB / 4);
  EXPECT_EQ(default_allreduce_capacities(5).oneshot_bytes, kMiB / 8);
}

TEST(AllReduceWorkspaceBytes, RefusesWhatNoMachineHas) {
  expect_error(kInvalid, {"ranks", "1 to 8", "9"}, [] { allreduce_workspace_bytes(9, {1, 1}); });
  expect_error(kInvalid, {"ranks", "0"}, [] { allreduce_workspace_bytes(0, {1, 1}); });
  expect_error(kInvalid, {"oneshot_bytes", "-1"}, [] { allreduce_workspace_bytes(2, {-1, 1}); });
  expect_error(kInvalid, {"twoshot_bytes", "-1"}, [] { allreduce_workspace_bytes(2, {1, -1}); });
  expect_error(kInvalid, {"oneshot_bytes", "2^32", "4294967297"}, [] {
    allreduce_workspace_bytes(2, {kMostOneShotBytes + 1, 1});
  });
  expect_error(kInvalid, {"twoshot_bytes", "2^34"}, [] {
    allreduce_workspace_bytes(2, {1, kMostTwoShotBytes + 1});
  });
  expect_error(kInvalid, {"twoshot_bytes"}, [] { allreduce_workspace_bytes(2, {1, INT64_MAX}); });
  EXPECT_GT(allreduce_workspace_bytes(8, {kMostOneShotBytes, kMostTwoShotBytes}),
            24 * kMostOneShotBytes + 3 * kMostTwoShotBytes);
}

}  // namespace
}  // namespace narrowfloat
