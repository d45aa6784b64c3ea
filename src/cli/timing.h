// How commands time an operation: wall clock, one run to warm up, then the median of the runs.
#pragma once

#include <cstdint>
#include <functional>

namespace narrowfloat::cli {

// Of the timed runs; the run that warms up is not among them.
struct Timing {
  int64_t num_runs = 0;
  double total_seconds = 0;
  double median_seconds = 0;
  double lower_quartile_seconds = 0;
  double upper_quartile_seconds = 0;
  double p10_seconds = 0;
  double p90_seconds = 0;

  // Distance of the quartiles in percent of the median.
  [[nodiscard]] double spread_percent() const;
  // What goes with a mean over runs that differ: a median may be that of a run without work.
  [[nodiscard]] double mean_seconds() const;
};

// Runs until `min_seconds` have passed, and at least five times. `after_run` is called after every
// timed run, and is not timed.
Timing time_runs(
    const std::function<void()>& body, double min_seconds,
    const std::function<void()>& after_run = [] {});

// Bytes (or operations) over time, in billions a second; 0 where no time was measured.
double billions_per_second(double amount, double seconds);

}  // namespace narrowfloat::cli
