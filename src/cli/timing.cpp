// The median, not the mean: one interruption by another process must not count.
#include "cli/timing.h"

#include <algorithm>
#include <chrono>
#include <vector>

namespace narrowfloat::cli {

double Timing::spread_percent() const {
  if (median_seconds <= 0) return 0;
  return 100 * (upper_quartile_seconds - lower_quartile_seconds) / median_seconds;
}

double Timing::mean_seconds() const {
  return num_runs > 0 ? total_seconds / static_cast<double>(num_runs) : 0;
}

Timing time_runs(const std::function<void()>& body, double min_seconds,
                 const std::function<void()>& after_run) {
  using Clock = std::chrono::steady_clock;
  constexpr size_t kMinRuns = 5;
  body();
  std::vector<double> seconds;
  double total = 0;
  while (total < min_seconds || seconds.size() < kMinRuns) {
    const Clock::time_point start = Clock::now();
    body();
    seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
    total += seconds.back();
    after_run();
  }
  std::sort(seconds.begin(), seconds.end());
  const size_t last = seconds.size() - 1;
  return {.num_runs = static_cast<int64_t>(seconds.size()),
          .total_seconds = total,
          .median_seconds = seconds[seconds.size() / 2],
          .lower_quartile_seconds = seconds[last / 4],
          .upper_quartile_seconds = seconds[last - last / 4],
          .p10_seconds = seconds[last / 10],
          .p90_seconds = seconds[last - last / 10]};
}

double billions_per_second(double amount, double seconds) {
  return seconds > 0 ? amount / seconds / 1e9 : 0;
}

}  // namespace narrowfloat::cli
