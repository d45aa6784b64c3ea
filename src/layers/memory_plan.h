// The number of rows of a tensor in memory at a time. Buffers of only one tensor exist at a time,
// so the most expensive tensor determines the peak; results never depend on the ranges.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace narrowfloat {

// Returns `requested`, or for 0 three quarters of the available memory (control groups included),
// at least 256 MiB. `root`: a prefix of /proc and /sys, for tests.
uint64_t memory_budget(uint64_t requested, const std::string& root = "");

// Bytes of all buffers for a range of that many rows; grows with them.
using RangeCost = std::function<uint64_t(int64_t rows)>;

// The rows at which ranges may begin. Encoding needs whole tiles (the block rows of the format).
// Decoding also takes a part of one tile, so its ranges are tiles, or 1, 2, 4... rows that divide a
// tile.
struct RowGrid {
  int64_t tile = 1;      // A power of two.
  int64_t smallest = 1;  // 1 or the tile.
};
// The most rows that a range of up to `rows` (at least 1) may have.
int64_t aligned_rows(int64_t rows, const RowGrid& grid);

struct RowRanges {
  int64_t rows = 0;            // Rows of the tensor.
  int64_t rows_at_a_time = 0;  // A size that the grid allows, or all rows.
  uint64_t buffer_bytes = 0;
};

// The largest ranges that fit. If not even the smallest fit, they cost more than the budget.
RowRanges plan_row_ranges(int64_t rows, uint64_t budget, const RowGrid& grid,
                          const RangeCost& cost);

// Calls body(first, count) for each range in order.
void for_each_range(const RowRanges& ranges, const std::function<void(int64_t, int64_t)>& body);

// Gathers the plans of all tensors.
class MemoryPlan {
 public:
  explicit MemoryPlan(uint64_t budget) : budget_(budget) {}

  [[nodiscard]] uint64_t budget() const { return budget_; }
  RowRanges add(const std::string& tensor, int64_t rows, const RowGrid& grid,
                const RangeCost& cost);
  // Adds a tensor that is copied byte by byte, in chunks of any size.
  void add_copy(uint64_t bytes);
  [[nodiscard]] uint64_t copy_buffer_bytes() const { return copy_bytes_; }
  // Whether buffers of so many bytes may stay beside those of any tensor; for one set of them at a
  // time. Called when all tensors are added.
  bool keep(uint64_t bytes);
  [[nodiscard]] uint64_t peak_bytes() const { return peak_bytes_ + kept_bytes_; }
  // Throws kInvalidArgument that names the smallest budget that works.
  void check() const;

 private:
  uint64_t budget_;
  uint64_t peak_bytes_ = 0;
  uint64_t copy_bytes_ = 0;
  uint64_t kept_bytes_ = 0;
  uint64_t largest_minimum_ = 0;
  int64_t largest_rows_ = 0;
  std::string largest_tensor_;
};

}  // namespace narrowfloat
