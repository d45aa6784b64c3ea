// Ranges of rows for a memory budget.
#include "layers/memory_plan.h"

#include <algorithm>

#include "narrowfloat/runtime.h"
#include "unit/layers/model_files.h"

namespace narrowfloat {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

uint64_t ten_per_row(int64_t rows) { return static_cast<uint64_t>(rows) * 10; }

constexpr RowGrid kTiles = {.tile = 128, .smallest = 128};

TEST(MemoryPlan, TakesAllRowsIfTheyFit) {
  const RowRanges ranges = plan_row_ranges(1000, 10'000, kTiles, ten_per_row);
  EXPECT_EQ(ranges.rows_at_a_time, 1000);
  EXPECT_EQ(ranges.buffer_bytes, 10'000U);
}

TEST(MemoryPlan, TakesWholeTilesOtherwise) {
  const RowRanges ranges = plan_row_ranges(1000, 9'999, kTiles, ten_per_row);
  EXPECT_EQ(ranges.rows_at_a_time, 896);
  std::vector<std::pair<int64_t, int64_t>> seen;
  for_each_range(ranges, [&](int64_t first, int64_t count) { seen.emplace_back(first, count); });
  EXPECT_EQ(seen, (std::vector<std::pair<int64_t, int64_t>>{{0, 896}, {896, 104}}));
}

TEST(MemoryPlan, TakesSingleRowsWithoutTiles) {
  EXPECT_EQ(plan_row_ranges(1000, 9'999, {}, ten_per_row).rows_at_a_time, 999);
  EXPECT_EQ(plan_row_ranges(1000, 25, {}, ten_per_row).rows_at_a_time, 2);
  EXPECT_EQ(plan_row_ranges(1000, 1, {}, ten_per_row).rows_at_a_time, 1);
  const auto with_a_fixed_part = [](int64_t rows) { return 5'000 + ten_per_row(rows); };
  EXPECT_EQ(plan_row_ranges(1000, 9'000, {}, with_a_fixed_part).rows_at_a_time, 400);
}

TEST(MemoryPlan, DecodingTakesAPartOfATileThatDividesIt) {
  const RowGrid grid = {.tile = 128, .smallest = 1};
  EXPECT_EQ(plan_row_ranges(1000, 9'999, grid, ten_per_row).rows_at_a_time, 896);
  EXPECT_EQ(plan_row_ranges(1000, 1'270, grid, ten_per_row).rows_at_a_time, 64);
  EXPECT_EQ(plan_row_ranges(1000, 1, grid, ten_per_row).rows_at_a_time, 1);
}

TEST(MemoryPlan, NamesTheSmallestBudget) {
  MemoryPlan plan(1'000);
  plan.add("small", 50, kTiles, ten_per_row);
  EXPECT_NO_THROW(plan.check());
  plan.add("large", 1'000, kTiles, ten_per_row);
  expect_error(ErrorKind::kInvalidArgument, "at least 1280 are needed (tensor 'large', 128 row",
               [&] { plan.check(); });
}

TEST(MemoryPlan, CopiesInBoundedPieces) {
  MemoryPlan plan(100'000);
  plan.add_copy(10'000'000);
  EXPECT_EQ(plan.copy_buffer_bytes(), 100'000U);
  EXPECT_EQ(plan.peak_bytes(), 100'000U);
}

TEST(MemoryPlan, DefaultBudgetIsPartOfTheMachine) {
  EXPECT_EQ(memory_budget(123), 123U);
  EXPECT_GE(memory_budget(0), kMiB * 256);
  // Both read the same machine, a moment apart.
  EXPECT_LE(available_memory_bytes() / 2, std::max(memory_budget(0), kMiB * 256));
  EXPECT_GT(available_memory_bytes(), kMiB);
}

TEST(MemoryPlan, KeepsBesideTheLargestTensorWhatFits) {
  MemoryPlan plan(100);
  (void)plan.add("a", 4, {}, [](int64_t rows) { return static_cast<uint64_t>(10 * rows); });
  EXPECT_EQ(plan.peak_bytes(), 40U);
  EXPECT_FALSE(plan.keep(61));
  EXPECT_EQ(plan.peak_bytes(), 40U);
  EXPECT_TRUE(plan.keep(60));
  EXPECT_TRUE(plan.keep(20));  // Not at the same time.
  EXPECT_EQ(plan.peak_bytes(), 100U);
}

// A machine in files: 8 GiB available, and what the tests add.
class MemoryBudgetTest : public ::testing::Test {
 protected:
  void SetUp() override {
    add("/proc/meminfo", "MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\n");
  }

  void add(const std::string& path, const std::string& text) {
    const std::string full_path = dir_.path() + path;
    std::filesystem::create_directories(std::filesystem::path(full_path).parent_path());
    write_file(full_path, text);
  }
  void add_group(const std::string& path, const std::string& limit, uint64_t current_mib,
                 uint64_t inactive_mib) {
    add(path + "/memory.max", limit);
    add(path + "/memory.current", std::to_string(current_mib * kMiB));
    add(path + "/memory.stat",
        "anon 1\ninactive_file " + std::to_string(inactive_mib * kMiB) + "\nactive_file 3\n");
  }
  [[nodiscard]] uint64_t available_mib() const {
    return memory_budget(0, dir_.path()) / 3 * 4 / kMiB;
  }

  TempDir dir_;
};

TEST_F(MemoryBudgetTest, IsThatOfTheSystemWithoutGroups) { EXPECT_EQ(available_mib(), 8192U); }

TEST_F(MemoryBudgetTest, PageCacheOfTheGroupIsAvailable) {
  add("/proc/self/cgroup", "0::/\n");
  add_group("/sys/fs/cgroup", std::to_string(4096 * kMiB), 4000, 3000);
  EXPECT_EQ(available_mib(), 3096U);
}

TEST_F(MemoryBudgetTest, EveryGroupAboveLimitsIt) {
  add("/proc/self/cgroup", "0::/a/b/c\n");
  add_group("/sys/fs/cgroup/a/b/c", "max", 10, 0);
  add_group("/sys/fs/cgroup/a/b", std::to_string(5000 * kMiB), 1000, 0);
  add_group("/sys/fs/cgroup/a", std::to_string(3000 * kMiB), 1000, 0);
  EXPECT_EQ(available_mib(), 2000U);
}

TEST_F(MemoryBudgetTest, ReadsVersion1) {
  add("/proc/self/cgroup", "3:cpu:/x\n2:memory:/docker/1\n0::/\n");
  const std::string group = "/sys/fs/cgroup/memory/docker/1";
  add(group + "/memory.limit_in_bytes", std::to_string(2048 * kMiB));
  add(group + "/memory.usage_in_bytes", std::to_string(1024 * kMiB));
  add(group + "/memory.stat",
      "inactive_file 1\ntotal_inactive_file " + std::to_string(512 * kMiB) + "\n");
  EXPECT_EQ(available_mib(), 1536U);
}

TEST_F(MemoryBudgetTest, HasAFloor) {
  add("/proc/self/cgroup", "0::/\n");
  add_group("/sys/fs/cgroup", std::to_string(4096 * kMiB), 4096, 0);
  EXPECT_EQ(memory_budget(0, dir_.path()), 256 * kMiB);
}

}  // namespace
}  // namespace narrowfloat
