// Machines have in common how long is measured, and the statistics of replays.
#include "cli_common/timing/machine.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "narrowfloat/error.h"

namespace narrowfloat::cli {
namespace {

// Rotated buffers exceed the cache so many times, with at most so many sets.
constexpr uint64_t kCacheMultiple = 4;
constexpr int64_t kMaxSets = 64;
constexpr int64_t kMaxCalls = 2000;
constexpr int kMinReplays = 5;
constexpr int kMaxReplays = 1000;

// Linear between the two nearest of the sorted times.
double quantile(const std::vector<double>& sorted, double fraction) {
  const double position = fraction * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<size_t>(position);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (position - std::floor(position)) * (sorted[above] - sorted[below]);
}

}  // namespace

uint64_t aligned(uint64_t size_bytes) {
  return (size_bytes + kBufferAlignment - 1) / kBufferAlignment * kBufferAlignment;
}

int64_t sets_beyond_cache(const MachineFacts& facts, uint64_t set_bytes) {
  const uint64_t wanted = kCacheMultiple * facts.cache_bytes;
  const auto enough = static_cast<int64_t>(wanted / std::max<uint64_t>(set_bytes, 1)) + 1;
  return std::clamp<int64_t>(enough, 2, kMaxSets);
}

int64_t calls_per_replay(double call_us, double replay_ms, int64_t least) {
  const double wanted = std::ceil(1e3 * replay_ms / std::max(call_us, 0.1));
  return std::max(static_cast<int64_t>(std::min(wanted, static_cast<double>(kMaxCalls))), least);
}

ReplayPlan Machine::plan_for(double min_seconds, int64_t calls, double replay_us) const {
  ReplayPlan plan{.calls = calls,
                  .replays = kMinReplays,
                  .min_seconds = min_seconds,
                  .is_programmatic = facts().has_programmatic_launch};
  if (is_host()) return plan;
  const double wanted = std::ceil(min_seconds * 1e6 / std::max(replay_us, 1.0));
  plan.replays = static_cast<int>(
      std::clamp(wanted, static_cast<double>(kMinReplays), static_cast<double>(kMaxReplays)));
  return plan;
}

double CallTime::spread_percent() const {
  return median_us > 0 ? 100 * (upper_quartile_us - lower_quartile_us) / median_us : 0;
}

double CallTime::mean_us() const {
  return num_calls() > 0 ? total_us / static_cast<double>(num_calls()) : 0;
}

CallTime call_time(std::vector<double> us_per_call, int64_t calls) {
  if (us_per_call.empty()) return {};
  std::sort(us_per_call.begin(), us_per_call.end());
  const double sum = std::accumulate(us_per_call.begin(), us_per_call.end(), 0.0);
  return {.median_us = quantile(us_per_call, 0.5),
          .lower_quartile_us = quantile(us_per_call, 0.25),
          .upper_quartile_us = quantile(us_per_call, 0.75),
          .p10_us = quantile(us_per_call, 0.1),
          .p90_us = quantile(us_per_call, 0.9),
          .total_us = sum * static_cast<double>(calls),
          .processor_us = 0,
          .calls = calls,
          .replays = static_cast<int>(us_per_call.size())};
}

#if !defined(NARROWFLOAT_CUDA)
std::unique_ptr<Machine> open_gpu(int /*index*/) {
  throw Error(ErrorKind::kUnsupported,
              "this build has no CUDA: configure with `cmake --preset sm90` and build that");
}
#endif

std::unique_ptr<Machine> open_machine(Device device) {
  return device.type == DeviceType::kCpu ? open_host() : open_gpu(device.index);
}

}  // namespace narrowfloat::cli
