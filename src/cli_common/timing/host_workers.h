// Threads that wait for work: to start new ones takes as long as to read megabytes.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace narrowfloat::cli {

class HostWorkers {
 public:
  // `count` threads, the caller's included. It calls the other constructor, so that the destructor
  // ends the threads that wait already where the next cannot start.
  explicit HostWorkers(int count) : HostWorkers() {
    for (int i = 1; i < count; ++i) threads_.emplace_back([this, i] { work(i); });
  }
  ~HostWorkers() {
    is_ending_ = true;
    start_round();
  }
  HostWorkers(const HostWorkers&) = delete;
  HostWorkers& operator=(const HostWorkers&) = delete;

  [[nodiscard]] int count() const { return static_cast<int>(threads_.size()) + 1; }

  // Calls body(0) to body(count() - 1), one on each thread, and waits for all.
  void run(const std::function<void(int index)>& body) {
    body_ = &body;
    working_ = static_cast<int>(threads_.size());
    start_round();
    body(0);
    for (int left = working_; left > 0; left = working_) working_.wait(left);
  }

 private:
  HostWorkers() = default;

  void start_round() {
    round_.fetch_add(1);
    round_.notify_all();
  }
  void work(int index) {
    for (uint64_t seen = 0;; ++seen) {
      round_.wait(seen);
      if (is_ending_) return;
      (*body_)(index);
      if (working_.fetch_sub(1) == 1) working_.notify_one();
    }
  }

  std::atomic<uint64_t> round_ = 0;
  std::atomic<int> working_ = 0;
  std::atomic<bool> is_ending_ = false;
  const std::function<void(int index)>* body_ = nullptr;
  std::vector<std::jthread> threads_;  // The last member: they end before the others.
};

}  // namespace narrowfloat::cli
