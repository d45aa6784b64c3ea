// What the sweeps of `narrowfloat bench` measure on: the host, or one GPU. Memory that calls work
// on, ways to fill and read it, traffic without arithmetic, and one way to time calls. Cases
// know nothing of CUDA and run on either machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cli/random_words.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat::cli {

struct MachineFacts {
  std::string name;
  std::string compute_capability;  // Empty on the host, as the next two.
  std::string driver;
  std::string cuda_runtime;
  int num_units = 0;  // Streaming multiprocessors, or threads.
  int max_clock_mhz = 0;
  uint64_t cache_bytes = 0;   // What buffers must exceed to come from memory.
  uint64_t stream_bytes = 0;  // Of a buffer that rates are measured with: start and end are little.
  uint64_t memory_bytes = 0;
  bool has_programmatic_launch = false;
};

// Bytes that a call moves, and where: as many reads and writes as a case has, nothing computed.
struct Traffic {
  const std::byte* from = nullptr;  // Aligned to 16, as `to`.
  uint64_t read_bytes = 0;
  std::byte* to = nullptr;
  uint64_t write_bytes = 0;
};

// How much a block of threads does in a kernel that moves traffic.
struct TrafficShape {
  int threads = 256;
  int vectors = 1;  // 16-byte accesses of a thread: 1, 2 or 4.
};

// Queues call `call_idx`.
using QueuedCall = std::function<void(int64_t call_idx, Stream stream)>;

struct ReplayPlan {
  int64_t calls = 1;  // In a replay, one after another.
  int replays = 1;    // That are timed; one more warms up.
  bool is_programmatic = false;
};

// Of one call: the time of a replay divided by its calls.
struct CallTime {
  double median_us = 0;
  double lower_quartile_us = 0;
  double upper_quartile_us = 0;
  double p10_us = 0;
  double p90_us = 0;
  double total_us = 0;  // Of all replays.
  int64_t calls = 0;
  int replays = 0;
};
// Of replays, in any order; zeros without one.
CallTime call_time(std::vector<double> us_per_call, int64_t calls);

class Machine {
 public:
  Machine() = default;
  virtual ~Machine() = default;
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  [[nodiscard]] virtual Device device() const = 0;
  [[nodiscard]] virtual const MachineFacts& facts() const = 0;

  // Memory for calls, aligned to 256: at least `size_bytes`, with what it held before where it
  // need not grow. All methods below that take addresses take them from it, unless they say "host".
  virtual std::byte* reserve(uint64_t size_bytes) = 0;

  // Elements [first, first + count) of one endless sequence of random values: BF16, F16 or F32.
  virtual void fill_random(std::byte* to, DType dtype, int64_t first, int64_t count) = 0;
  // The beginning of the words; `size_bytes` of any size.
  virtual void fill_words(std::byte* to, const RandomWords& words, uint64_t size_bytes) = 0;
  virtual void fill_bytes(std::byte* to, uint8_t value, uint64_t size_bytes) = 0;
  virtual void copy(std::byte* to, const std::byte* from, uint64_t size_bytes) = 0;
  virtual void write(std::byte* to, const std::byte* host, uint64_t size_bytes) = 0;
  virtual void read(std::byte* host, const std::byte* from, uint64_t size_bytes) = 0;
  // Sizes are multiples of 16.
  virtual bool is_equal(const std::byte* a, const std::byte* b, uint64_t size_bytes) = 0;

  // Which shape is fastest depends on the size: all that may be, to be timed.
  [[nodiscard]] virtual std::vector<TrafficShape> traffic_shapes(const Traffic& traffic) const = 0;
  virtual void queue_traffic(const Traffic& traffic, const TrafficShape& shape, Stream stream) = 0;
  // The machine's own way to copy.
  virtual void queue_copy(std::byte* to, const std::byte* from, uint64_t size_bytes,
                          Stream stream) = 0;

  virtual void wait() = 0;  // Until everything above has happened.
  // Runs it once and waits; returns microseconds, with the launch.
  virtual double run_once(const QueuedCall& call) = 0;
  virtual CallTime time_calls(const QueuedCall& call, const ReplayPlan& plan) = 0;
  // Kernels, copies and memsets that a call queues; 0 on the host, which has no queue.
  virtual int64_t count_launches(const QueuedCall& call) = 0;
};

std::unique_ptr<Machine> open_host();
// Throws kUnsupported in a build without CUDA and where there is no such GPU.
std::unique_ptr<Machine> open_gpu(int index);

}  // namespace narrowfloat::cli
