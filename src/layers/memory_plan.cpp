// Available memory is what the kernel says it can give without swapping, and what the control group
// (a container) has left, whichever is less.
#include "layers/memory_plan.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>

#include "base/throw_error.h"
#include "checkpoint/escape.h"
#include "layers/weight_reader.h"

namespace narrowfloat {
namespace {

constexpr uint64_t kCopyBufferBytes = uint64_t{4} << 20;
constexpr uint64_t kMinCopyBufferBytes = uint64_t{4} << 10;

std::optional<uint64_t> number_in_file(const char* path) {
  std::ifstream file(path);
  uint64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;  // Missing, or "max".
}

std::optional<uint64_t> available_in_system() {
  std::ifstream file("/proc/meminfo");
  std::string key;
  uint64_t kibibytes = 0;
  std::string unit;
  while (file >> key >> kibibytes) {
    if (key == "MemAvailable:") return kibibytes << 10;
    std::getline(file, unit);
  }
  return std::nullopt;
}

std::optional<uint64_t> available_in_group() {
  const std::optional<uint64_t> limit = number_in_file("/sys/fs/cgroup/memory.max");
  const std::optional<uint64_t> used = number_in_file("/sys/fs/cgroup/memory.current");
  if (!limit || !used) return std::nullopt;
  return *limit - std::min(*limit, *used);
}

}  // namespace

uint64_t memory_budget(uint64_t requested) {
  if (requested != 0) return requested;
  constexpr uint64_t kUnknown = std::numeric_limits<uint64_t>::max();
  const uint64_t available =
      std::min(available_in_system().value_or(kUnknown), available_in_group().value_or(kUnknown));
  return available / 4 * 3;
}

RowRanges plan_row_ranges(int64_t rows, uint64_t budget, const RangeCost& cost) {
  const uint64_t all = cost(rows);
  if (all <= budget || rows <= kRangeRows) return {rows, rows, all};
  const uint64_t unit = cost(kRangeRows);
  const uint64_t units = std::max<uint64_t>(1, budget / unit);
  const int64_t at_a_time = static_cast<int64_t>(units) * kRangeRows;
  return {rows, at_a_time, cost(at_a_time)};
}

void for_each_range(const RowRanges& ranges, const std::function<void(int64_t, int64_t)>& body) {
  for (int64_t first = 0; first < ranges.rows; first += ranges.rows_at_a_time) {
    body(first, std::min(ranges.rows_at_a_time, ranges.rows - first));
  }
}

RowRanges MemoryPlan::add(const std::string& tensor, int64_t rows, const RangeCost& cost) {
  const RowRanges ranges = plan_row_ranges(rows, budget_, cost);
  peak_bytes_ = std::max(peak_bytes_, ranges.buffer_bytes);
  const uint64_t minimum = cost(std::min(rows, kRangeRows));
  if (minimum > largest_minimum_) {
    largest_minimum_ = minimum;
    largest_tensor_ = tensor;
  }
  return ranges;
}

void MemoryPlan::add_copy(uint64_t bytes) {
  const uint64_t most = std::clamp(budget_, kMinCopyBufferBytes, kCopyBufferBytes);
  copy_bytes_ = std::max(copy_bytes_, std::min(bytes, most));
  peak_bytes_ = std::max(peak_bytes_, copy_bytes_);
  largest_minimum_ = std::max(largest_minimum_, std::min(bytes, kMinCopyBufferBytes));
}

void MemoryPlan::check() const {
  if (largest_minimum_ <= budget_) return;
  throw_invalid("max_memory_bytes: {} bytes are too few; at least {} are needed{}", budget_,
                largest_minimum_,
                largest_tensor_.empty() ? ""
                                        : fmt::format(" (tensor '{}', {} rows at a time)",
                                                      printable(largest_tensor_), kRangeRows));
}

}  // namespace narrowfloat
