// How many rows of a tensor are in memory at a time. Buffers of one tensor exist at a time, so the
// most expensive tensor decides the peak; results never depend on the ranges.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace narrowfloat {

// `requested`, or for 0 three quarters of the memory that is available (control group included).
uint64_t memory_budget(uint64_t requested);

// Bytes of all buffers for a range of that many rows.
using RangeCost = std::function<uint64_t(int64_t rows)>;

struct RowRanges {
  int64_t rows = 0;            // Of the tensor.
  int64_t rows_at_a_time = 0;  // A multiple of 128, or all.
  uint64_t buffer_bytes = 0;
};

// The largest ranges that fit. Cost must grow at most linearly in multiples of 128 rows. Where not
// even 128 rows fit, the ranges have 128 rows and cost more than the budget.
RowRanges plan_row_ranges(int64_t rows, uint64_t budget, const RangeCost& cost);

// Calls body(first, count) for each range in order.
void for_each_range(const RowRanges& ranges, const std::function<void(int64_t, int64_t)>& body);

// Gathers the plans of all tensors.
class MemoryPlan {
 public:
  explicit MemoryPlan(uint64_t budget) : budget_(budget) {}

  [[nodiscard]] uint64_t budget() const { return budget_; }
  RowRanges add(const std::string& tensor, int64_t rows, const RangeCost& cost);
  // For what is copied without being understood, in pieces of any size.
  void add_copy(uint64_t bytes);
  [[nodiscard]] uint64_t copy_buffer_bytes() const { return copy_bytes_; }
  [[nodiscard]] uint64_t peak_bytes() const { return peak_bytes_; }
  // Throws kInvalidArgument that names the smallest budget that works.
  void check() const;

 private:
  uint64_t budget_;
  uint64_t peak_bytes_ = 0;
  uint64_t copy_bytes_ = 0;
  uint64_t largest_minimum_ = 0;
  std::string largest_tensor_;
};

}  // namespace narrowfloat
