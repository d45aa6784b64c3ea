// Available memory is the smaller of what the kernel says it can give without swapping and what the
// control groups (a container) have left.
#include "layers/memory_plan.h"

#include <algorithm>
#include <bit>
#include <fstream>
#include <limits>
#include <optional>

#include "base/throw_error.h"
#include "checkpoint/escape.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat {
namespace {

constexpr uint64_t kCopyBufferBytes = uint64_t{4} << 20;
constexpr uint64_t kMinCopyBufferBytes = uint64_t{4} << 10;
// A busy group may show less than this for a moment; that is no basis for a plan.
constexpr uint64_t kMinDefaultBudget = uint64_t{256} << 20;
constexpr uint64_t kUnknown = std::numeric_limits<uint64_t>::max();

std::optional<uint64_t> number_in_file(const std::string& path) {
  std::ifstream file(path);
  uint64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;  // Missing, or "max".
}

// The number after `key` in a file of lines "key number ...".
std::optional<uint64_t> keyed_number(const std::string& path, std::string_view key) {
  std::ifstream file(path);
  std::string found;
  uint64_t value = 0;
  std::string rest;
  while (file >> found >> value) {
    if (found == key) return value;
    std::getline(file, rest);
  }
  return std::nullopt;
}

// The differences between the versions of control groups.
struct GroupFiles {
  const char* mount;
  const char* limit;
  const char* usage;
  const char* reclaimable;  // Key in memory.stat: page cache that the kernel drops when asked.
};
constexpr GroupFiles kVersion1 = {"/sys/fs/cgroup/memory", "memory.limit_in_bytes",
                                  "memory.usage_in_bytes", "total_inactive_file"};
constexpr GroupFiles kVersion2 = {"/sys/fs/cgroup", "memory.max", "memory.current",
                                  "inactive_file"};

uint64_t available_in_group(const std::string& directory, const GroupFiles& files) {
  const std::optional<uint64_t> limit = number_in_file(directory + "/" + files.limit);
  const std::optional<uint64_t> usage = number_in_file(directory + "/" + files.usage);
  if (!limit || !usage) return kUnknown;
  const uint64_t cache = keyed_number(directory + "/memory.stat", files.reclaimable).value_or(0);
  const uint64_t used = *usage - std::min(*usage, cache);
  return *limit - std::min(*limit, used);
}

// Every group above ours limits it too. A container may see its own group as the mount while
// `group` is a path of the host: paths that do not exist are skipped.
uint64_t available_in_groups(const std::string& mount, std::string group, const GroupFiles& files) {
  if (group.find("..") != std::string::npos) group.clear();  // It is outside of the visible tree.
  uint64_t available = available_in_group(mount, files);
  while (group.size() > 1) {
    available = std::min(available, available_in_group(mount + group, files));
    group.resize(group.rfind('/'));
  }
  return available;
}

// Lines of /proc/self/cgroup are "id:controllers:/group"; version 2 has no controllers.
uint64_t available_in_groups(const std::string& root) {
  uint64_t available = kUnknown;
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    if (second + 1 >= line.size() || line[second + 1] != '/') continue;
    const std::string controllers = fmt::format(",{},", line.substr(first + 1, second - first - 1));
    const bool is_version2 = controllers == ",,";
    if (!is_version2 && controllers.find(",memory,") == std::string::npos) continue;
    const GroupFiles& files = is_version2 ? kVersion2 : kVersion1;
    available = std::min(available,
                         available_in_groups(root + files.mount, line.substr(second + 1), files));
  }
  return available;
}

uint64_t available_memory(const std::string& root) {
  const std::optional<uint64_t> kibibytes = keyed_number(root + "/proc/meminfo", "MemAvailable:");
  const uint64_t in_system = kibibytes ? *kibibytes << 10 : kUnknown;
  return std::min(in_system, available_in_groups(root));
}

}  // namespace

uint64_t available_memory_bytes() { return available_memory(""); }

uint64_t memory_budget(uint64_t requested, const std::string& root) {
  if (requested != 0) return requested;
  return std::max(available_memory(root) / 4 * 3, kMinDefaultBudget);
}

int64_t aligned_rows(int64_t rows, const RowGrid& grid) {
  if (rows >= grid.tile) return rows - rows % grid.tile;
  if (grid.smallest == grid.tile) return grid.tile;
  return static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(std::max<int64_t>(1, rows))));
}

RowRanges plan_row_ranges(int64_t rows, uint64_t budget, const RowGrid& grid,
                          const RangeCost& cost) {
  const uint64_t all = cost(rows);
  if (all <= budget || rows <= grid.smallest) return {rows, rows, all};
  int64_t fits = grid.smallest;  // Stays so if nothing fits.
  for (int64_t too_many = rows; too_many - fits > 1;) {
    const int64_t middle = fits + (too_many - fits) / 2;
    (cost(middle) <= budget ? fits : too_many) = middle;
  }
  const int64_t at_a_time = aligned_rows(fits, grid);
  return {rows, at_a_time, cost(at_a_time)};
}

void for_each_range(const RowRanges& ranges, const std::function<void(int64_t, int64_t)>& body) {
  for (int64_t first = 0; first < ranges.rows; first += ranges.rows_at_a_time) {
    body(first, std::min(ranges.rows_at_a_time, ranges.rows - first));
  }
}

RowRanges MemoryPlan::add(const std::string& tensor, int64_t rows, const RowGrid& grid,
                          const RangeCost& cost) {
  const RowRanges ranges = plan_row_ranges(rows, budget_, grid, cost);
  peak_bytes_ = std::max(peak_bytes_, ranges.buffer_bytes);
  const int64_t smallest = std::min(rows, grid.smallest);
  const uint64_t minimum = cost(smallest);
  if (minimum > largest_minimum_) {
    largest_minimum_ = minimum;
    largest_rows_ = smallest;
    largest_tensor_ = tensor;
  }
  return ranges;
}

bool MemoryPlan::keep(uint64_t bytes) {
  if (peak_bytes_ > budget_ || bytes > budget_ - peak_bytes_) return false;
  kept_bytes_ = std::max(kept_bytes_, bytes);
  return true;
}

void MemoryPlan::add_copy(uint64_t bytes) {
  const uint64_t most = std::clamp(budget_, kMinCopyBufferBytes, kCopyBufferBytes);
  copy_bytes_ = std::max(copy_bytes_, std::min(bytes, most));
  peak_bytes_ = std::max(peak_bytes_, copy_bytes_);
  largest_minimum_ = std::max(largest_minimum_, std::min(bytes, kMinCopyBufferBytes));
}

void MemoryPlan::check() const {
  if (largest_minimum_ <= budget_) return;
  throw_invalid("option max_memory_bytes: {} bytes are too few; at least {} are needed{}", budget_,
                largest_minimum_,
                largest_tensor_.empty() ? ""
                                        : fmt::format(" (tensor '{}', {} row(s) at a time)",
                                                      printable(largest_tensor_), largest_rows_));
}

}  // namespace narrowfloat
