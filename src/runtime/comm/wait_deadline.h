// The time limit of one blocking call, and the growing pauses between two looks at something that
// nothing can wake a process for: a file, a word of shared memory, a port that nobody listens on.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace narrowfloat {

class WaitDeadline {
 public:
  using Clock = std::chrono::steady_clock;

  // Limits above a year count as a year, so that no sum overflows.
  explicit WaitDeadline(std::chrono::milliseconds limit)
      : end_(Clock::now() + std::min<std::chrono::milliseconds>(limit, std::chrono::hours(8760))) {}

  [[nodiscard]] bool passed() const { return Clock::now() >= end_; }
  // Never negative.
  [[nodiscard]] Clock::duration remaining() const {
    return std::max(end_ - Clock::now(), Clock::duration::zero());
  }
  // The remaining time, but at most `longest`, as poll() takes it: 0 only if the deadline has
  // passed.
  [[nodiscard]] int poll_timeout(std::chrono::milliseconds longest) const {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(remaining());
    return static_cast<int>(
        std::min({left, longest, std::chrono::milliseconds(3'600'000)}).count());
  }

 private:
  Clock::time_point end_;
};

class BackOff {
 public:
  BackOff(std::chrono::microseconds first, std::chrono::microseconds longest)
      : pause_(first), longest_(longest) {}

  // Each pause is twice as long as the one before, up to the longest; none outlasts the deadline.
  void sleep(const WaitDeadline& deadline) {
    std::this_thread::sleep_for(
        std::min<WaitDeadline::Clock::duration>(pause_, deadline.remaining()));
    pause_ = std::min(2 * pause_, longest_);
  }

 private:
  std::chrono::microseconds pause_;
  std::chrono::microseconds longest_;
};

}  // namespace narrowfloat
