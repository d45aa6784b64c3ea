// The Cta of comm/protocol.h on the CPU: one thread. All memory that several ranks touch at a time
// is accessed through std::atomic_ref of 32-bit words, which works between processes, too.
//
// A rank runs one CTA in the calling thread. Tests may ask for more, which then run in threads of
// their own, and may set a function that is called at every protocol point.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "comm/protocol.h"
#include "runtime/float_environment.h"

namespace narrowfloat {

// Tests change these settings, which are those of the process.
using ProtocolPointFunction = void (*)(int rank, int cta, ProtocolPoint point);
// Null: nothing is called.
void set_protocol_point_function(ProtocolPointFunction function);
void set_cpu_ctas_per_rank(int count);  // 1 to CpuCta::kMostCtas.

namespace cpu_cta_detail {

struct TestSettings {
  std::atomic<ProtocolPointFunction> reached{nullptr};
  std::atomic<int> ctas_per_rank{1};
};
TestSettings& test_settings();

}  // namespace cpu_cta_detail

class CpuCta {
 public:
  CpuCta(int rank, int index, int num_ctas)
      : rank_(rank),
        index_(index),
        num_ctas_(num_ctas),
        reached_(cpu_cta_detail::test_settings().reached.load(std::memory_order_relaxed)) {}

  static constexpr int kMostCtas = 8;
  bool aborted = false;

  [[nodiscard]] int index() const { return index_; }
  [[nodiscard]] int num_ctas() const { return num_ctas_; }
  [[nodiscard]] int cluster() const { return index_; }
  [[nodiscard]] int num_clusters() const { return num_ctas_; }
  [[nodiscard]] static int thread() { return 0; }
  [[nodiscard]] static int num_threads() { return 1; }
  [[nodiscard]] static bool is_leader() { return true; }
  static void sync() {}
  static bool sync_any(bool condition) { return condition; }

  template <class Function>
  static void for_each_leaf(int64_t leaves, Function&& function) {
    for (int64_t leaf = 0; leaf < leaves; ++leaf) function(leaf, true);
  }
  template <class Function>
  void for_each_cell(int64_t count, Function&& function) const {
    for (int64_t i = index_; i < count; i += num_ctas_) function(i);
  }

  template <class LeafType>
  static void send(LeafType* to, const LeafType& leaf) {
    for (int i = 0; i < LeafType::kWords; ++i) {
      std::atomic_ref(to->words[i]).store(leaf.words[i], std::memory_order_relaxed);
    }
  }
  template <class LeafType>
  static LeafType poll(const LeafType* from) {
    LeafType leaf;
    for (int i = 0; i < LeafType::kWords; ++i) leaf.words[i] = load_relaxed(&from->words[i]);
    return leaf;
  }
  static uint32_t load_relaxed(const uint32_t* address) {
    return reference(address).load(std::memory_order_relaxed);
  }
  static uint32_t load_acquire(const uint32_t* address) {
    return reference(address).load(std::memory_order_acquire);
  }
  static void store_release(uint32_t* address, uint32_t value) {
    reference(address).store(value, std::memory_order_release);
  }
  static void fence() {
#if !defined(__SANITIZE_THREAD__)  // Which knows no fences.
    std::atomic_thread_fence(std::memory_order_acq_rel);
#endif
  }
  static void end_call() { fence(); }
  static bool claim(uint32_t* address) {
    uint32_t expected = 0;
    return reference(address).compare_exchange_strong(expected, 1, std::memory_order_acq_rel);
  }

  static uint64_t now_ns() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
  }
  // A few spins on the core, in case that the peer runs on another one; then other threads run:
  // there may be fewer cores than ranks.
  static void pause(uint32_t spins) {
    constexpr uint32_t kSpinsOnTheCore = 64;
    if (spins > kSpinsOnTheCore) return std::this_thread::yield();
#if defined(__x86_64__)
    _mm_pause();
#endif
  }
  static void after_push() {}
  void reached(ProtocolPoint point) const {
    if (reached_ != nullptr) reached_(rank_, index_, point);
  }

 private:
  static std::atomic_ref<uint32_t> reference(const uint32_t* address) {
    // atomic_ref takes no constants (before C++26), also for loads.
    return std::atomic_ref<uint32_t>(*const_cast<uint32_t*>(address));
  }

  int rank_;
  int index_;
  int num_ctas_;
  ProtocolPointFunction reached_;
};

// Calls body(cta) for all CTAs of a rank, in the specified floating-point environment.
template <class Body>
void run_cpu_ctas(int rank, const Body& body) {
  const int count = cpu_cta_detail::test_settings().ctas_per_rank.load(std::memory_order_relaxed);
  const auto run = [&](int index) {
    const FloatEnvironmentGuard guard;
    CpuCta cta(rank, index, count);
    body(cta);
  };
  std::vector<std::thread> threads;
  for (int index = 1; index < count; ++index) threads.emplace_back(run, index);
  run(0);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace narrowfloat
