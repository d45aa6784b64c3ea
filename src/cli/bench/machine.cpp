// What machines have in common.
#include "cli/bench/machine.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace narrowfloat::cli {
namespace {

// Linear between the two nearest of the sorted times.
double quantile(const std::vector<double>& sorted, double fraction) {
  const double position = fraction * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<size_t>(position);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (position - std::floor(position)) * (sorted[above] - sorted[below]);
}

}  // namespace

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
          .calls = calls,
          .replays = static_cast<int>(us_per_call.size())};
}

}  // namespace narrowfloat::cli
