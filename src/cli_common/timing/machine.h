// The timing harness of both programs. A Machine is what calls of the library are measured on: the
// host, or one GPU. It has memory that calls work on, ways to fill and read it, traffic without
// arithmetic to compare a call with, and one way to time calls: replays. On a GPU a replay is a
// CUDA graph of several calls, timed by events; on the host it is the calls themselves, timed by
// the clock. What is measured knows nothing of CUDA and runs on either machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cli_common/host_memory.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat::cli {

// Buffers of calls begin at multiples of this.
constexpr uint64_t kBufferAlignment = 256;
uint64_t aligned(uint64_t size_bytes);
// Outputs are filled with it before they are timed: a NaN in every floating-point type.
constexpr uint8_t kPoison = 0xFF;

struct MachineFacts {
  std::string name;
  std::string compute_capability;  // Empty on the host, as the next two.
  std::string driver;
  std::string cuda_runtime;
  int num_units = 0;  // SMs of a GPU, threads of the host.
  int max_clock_mhz = 0;
  uint64_t cache_bytes = 0;   // Buffers that are to come from memory must exceed it.
  uint64_t stream_bytes = 0;  // A buffer to measure rates with: its start and end are little.
  uint64_t memory_bytes = 0;  // Available memory of the host, all memory of a GPU.
  bool has_programmatic_launch = false;
};
// Sets of buffers of `set_bytes` that calls rotate through, so that inputs come from memory: two
// at least, and so many that they exceed the cache several times.
int64_t sets_beyond_cache(const MachineFacts& facts, uint64_t set_bytes);

// Bytes that a call moves: as many reads and writes as a case has, nothing computed.
struct Traffic {
  const std::byte* from = nullptr;  // Aligned to 16, as `to`.
  uint64_t read_bytes = 0;
  std::byte* to = nullptr;
  uint64_t write_bytes = 0;
  // Moved besides, in memory that stays in place from call to call: what a call stores and loads
  // again.
  std::byte* exchange = nullptr;
  uint64_t exchange_read_bytes = 0;
  uint64_t exchange_write_bytes = 0;
};

// How traffic is moved: the work of a CTA of a kernel, or the host's stores.
struct TrafficShape {
  int threads = 256;
  int vectors = 1;           // 16-byte accesses of a thread: 1, 2 or 4.
  bool is_streamed = false;  // On the host: stores go past the caches.
};

// Queues call `call_idx`. Every replay of a graph repeats calls 0 to ReplayPlan::calls - 1; on the
// host the numbers count on from replay to replay.
using QueuedCall = std::function<void(int64_t call_idx, Stream stream)>;

struct ReplayPlan {
  int64_t calls = 1;       // Calls in a replay, one after another.
  int replays = 1;         // Timed replays; one more before them warms up.
  double min_seconds = 0;  // The host goes on until its timed replays have taken so long.
  bool is_programmatic = false;
};

// Calls of `call_us` each that make a replay of about `replay_ms`: at least `least`.
constexpr double kReplayMs = 3;
int64_t calls_per_replay(double call_us, double replay_ms = kReplayMs, int64_t least = 1);

// The time of one call: that of a replay divided by its calls.
struct CallTime {
  double median_us = 0;
  double lower_quartile_us = 0;
  double upper_quartile_us = 0;
  double p10_us = 0;
  double p90_us = 0;
  double total_us = 0;  // The time of all replays.
  // On a CPU: the least processor time of a call, of all threads together. Other programs disturb
  // it less than the time on the clock.
  double processor_us = 0;
  int64_t calls = 0;  // Calls in a replay.
  int replays = 0;

  [[nodiscard]] int64_t num_calls() const { return calls * replays; }
  // The distance of the quartiles in percent of the median.
  [[nodiscard]] double spread_percent() const;
  // The mean goes with amounts that differ from call to call: a median may be that of a call
  // without work.
  [[nodiscard]] double mean_us() const;
};
// The statistics of replays, in any order; zeros without one.
CallTime call_time(std::vector<double> us_per_call, int64_t calls);

class Machine {
 public:
  Machine() = default;
  virtual ~Machine() = default;
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  [[nodiscard]] virtual Device device() const = 0;
  [[nodiscard]] virtual const MachineFacts& facts() const = 0;
  [[nodiscard]] bool is_host() const { return device().type == DeviceType::kCpu; }

  // Memory for calls, aligned to kBufferAlignment: at least `size_bytes`, with its content where
  // it need not grow. All methods below that take addresses take them from it, unless they say
  // "host".
  virtual std::byte* reserve(uint64_t size_bytes) = 0;
  // Asks for large pages, which memory gets that is not written yet, as packed weights do.
  virtual void take_large_pages(std::byte* /*memory*/, uint64_t /*size_bytes*/) {}

  // Writes elements [first, first + count) of one endless sequence of random values: BF16, F16 or
  // F32.
  virtual void fill_random(std::byte* to, DType dtype, int64_t first, int64_t count) = 0;
  // Writes the beginning of the words; `size_bytes` may have any size.
  virtual void fill_words(std::byte* to, const RandomWords& words, uint64_t size_bytes) = 0;
  virtual void fill_bytes(std::byte* to, uint8_t value, uint64_t size_bytes) = 0;
  virtual void copy(std::byte* to, const std::byte* from, uint64_t size_bytes) = 0;
  virtual void write(std::byte* to, const std::byte* host, uint64_t size_bytes) = 0;
  virtual void read(std::byte* host, const std::byte* from, uint64_t size_bytes) = 0;
  // Compares sizes that are multiples of 16.
  virtual bool is_equal(const std::byte* a, const std::byte* b, uint64_t size_bytes) = 0;

  // All shapes that may be the fastest, to be timed: which one is depends on the size.
  [[nodiscard]] virtual std::vector<TrafficShape> traffic_shapes(const Traffic& traffic) const = 0;
  virtual void queue_traffic(const Traffic& traffic, const TrafficShape& shape, Stream stream) = 0;
  // The machine's own way to copy.
  virtual void queue_copy(std::byte* to, const std::byte* from, uint64_t size_bytes,
                          Stream stream) = 0;

  virtual void wait() = 0;  // Until everything above has happened.
  // Runs call 0 once and waits; returns microseconds, with the launch.
  virtual double run_once(const QueuedCall& call) = 0;
  virtual CallTime time_calls(const QueuedCall& call, const ReplayPlan& plan) = 0;
  // Kernels, copies and memsets that a call queues; 0 on the host, which has no queue.
  virtual int64_t count_launches(const QueuedCall& call) = 0;

  // The plan of a measurement of about `min_seconds`, from replays that take `replay_us` each: 5
  // replays at least. A GPU's replays are queued at once, so their number comes from `replay_us`,
  // at most 1000; the host, which needs no `replay_us`, goes on until the time has passed.
  [[nodiscard]] ReplayPlan plan_for(double min_seconds, int64_t calls, double replay_us) const;
};

std::unique_ptr<Machine> open_host();
// Throws kUnsupported in a build without CUDA and where there is no such GPU.
std::unique_ptr<Machine> open_gpu(int index);
std::unique_ptr<Machine> open_machine(Device device);

}  // namespace narrowfloat::cli
