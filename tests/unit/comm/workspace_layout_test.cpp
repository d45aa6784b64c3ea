// Sizes and offsets of workspaces, also of absurd ones.
#include "comm/workspace_layout.h"

#include <gtest/gtest.h>

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
      EXPECT_GE(region.result, region.staging + 2 * capacity);
      EXPECT_GE(region.size_bytes, region.result + 2 * capacity);
      for (const int64_t part : {region.barriers, region.control, region.oneshot, region.staging,
                                 region.result, region.size_bytes}) {
        EXPECT_EQ(part % kControlLine, 0);
      }
      EXPECT_EQ(allreduce_workspace_bytes(ranks, {capacity, 2 * capacity}), region.size_bytes);
    }
  }
}

// Spec 7.1: 48 MiB + 64 MiB, 12 + 64 and 6 + 64, beside the control words.
TEST(AllReduceCapacities, HaveTheDefaultsOfTheSpecification) {
  const auto size = [](int ranks) {
    return allreduce_workspace_bytes(ranks, default_allreduce_capacities(ranks)) / kMiB;
  };
  EXPECT_EQ(size(2), 48 + 64);
  EXPECT_EQ(size(4), 12 + 64);
  EXPECT_EQ(size(8), 6 + 64);
  EXPECT_EQ(default_allreduce_capacities(3).oneshot_bytes, kMiB);
  EXPECT_EQ(default_allreduce_capacities(5).oneshot_bytes, kMiB / 4);
}

TEST(AllReduceWorkspaceBytes, RefusesWhatNoMachineHas) {
  constexpr int64_t kMost = int64_t{1} << 62;
  expect_error(kInvalid, {"ranks", "1 to 8", "9"}, [] { allreduce_workspace_bytes(9, {1, 1}); });
  expect_error(kInvalid, {"ranks", "0"}, [] { allreduce_workspace_bytes(0, {1, 1}); });
  expect_error(kInvalid, {"oneshot_bytes", "-1"}, [] { allreduce_workspace_bytes(2, {-1, 1}); });
  expect_error(kInvalid, {"twoshot_bytes", "-1"}, [] { allreduce_workspace_bytes(2, {1, -1}); });
  expect_error(kInvalid, {"oneshot_bytes", "2^32", "4294967297"}, [] {
    allreduce_workspace_bytes(2, {kMostOneShotBytes + 1, 1});
  });
  expect_error(kInvalid, {"twoshot_bytes"}, [] { allreduce_workspace_bytes(2, {1, INT64_MAX}); });
  expect_error(kInvalid, {"2^62"}, [] { allreduce_workspace_bytes(1, {0, kMost / 2}); });
  expect_error(kInvalid, {"2^62"}, [] { allreduce_workspace_bytes(1, {0, kMost}); });
  EXPECT_GT(allreduce_workspace_bytes(8, {kMostOneShotBytes, kMost / 3}), kMost / 2);
}

}  // namespace
}  // namespace narrowfloat
