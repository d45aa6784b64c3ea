// Ranges of rows for a memory budget.
#include "layers/memory_plan.h"

#include "unit/layers/model_files.h"

namespace narrowfloat {
namespace {

uint64_t ten_per_row(int64_t rows) { return static_cast<uint64_t>(rows) * 10; }

TEST(MemoryPlan, TakesAllRowsIfTheyFit) {
  const RowRanges ranges = plan_row_ranges(1000, 10'000, ten_per_row);
  EXPECT_EQ(ranges.rows_at_a_time, 1000);
  EXPECT_EQ(ranges.buffer_bytes, 10'000U);
}

TEST(MemoryPlan, TakesMultiplesOf128RowsOtherwise) {
  const RowRanges ranges = plan_row_ranges(1000, 9'999, ten_per_row);
  EXPECT_EQ(ranges.rows_at_a_time, 896);
  std::vector<std::pair<int64_t, int64_t>> seen;
  for_each_range(ranges, [&](int64_t first, int64_t count) { seen.emplace_back(first, count); });
  EXPECT_EQ(seen, (std::vector<std::pair<int64_t, int64_t>>{{0, 896}, {896, 104}}));
}

TEST(MemoryPlan, NamesTheSmallestBudget) {
  MemoryPlan plan(1'000);
  plan.add("small", 50, ten_per_row);
  EXPECT_NO_THROW(plan.check());
  plan.add("large", 1'000, ten_per_row);
  expect_error(ErrorKind::kInvalidArgument, "at least 1280 are needed (tensor 'large'",
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
  EXPECT_GT(memory_budget(0), uint64_t{1} << 20);
}

}  // namespace
}  // namespace narrowfloat
