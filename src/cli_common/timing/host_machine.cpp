// The host as a machine: plain memory, the wall clock, no queue. It makes the cases that are
// measured on GPUs run anywhere.
#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstring>
#include <ctime>
#include <fstream>
#include <limits>
#include <new>
#include <numeric>
#include <optional>
#include <utility>

#include "cli_common/timing/host_workers.h"
#include "cli_common/timing/machine.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat::cli {
namespace {

constexpr std::align_val_t kHostAlignment{kBufferAlignment};
// Buffers exceed this several times, and the third-level cache, where Linux knows it and it is a
// small part of the memory. (sysconf() has other numbers on virtual machines.)
constexpr uint64_t kLeastCacheBytes = 32U << 20U;
uint64_t cache_bytes(uint64_t memory_bytes) {
  uint64_t kibibytes = 0;
  std::ifstream("/sys/devices/system/cpu/cpu0/cache/index3/size") >> kibibytes;
  return std::max(kLeastCacheBytes, std::min(kibibytes << 10U, memory_bytes / 64));
}

// Mixes all bits of an index (Steele, Lea and Flood, "Fast splittable pseudorandom number
// generators", the finaliser with Stafford's constants).
uint64_t mixed(uint64_t index) {
  uint64_t bits = (index + 1) * 0x9E3779B97F4A7C15U;
  bits = (bits ^ (bits >> 30U)) * 0xBF58476D1CE4E5B9U;
  bits = (bits ^ (bits >> 27U)) * 0x94D049BB133111EBU;
  return bits ^ (bits >> 31U);
}

// Values below 1 made from their bits: the exponent is geometric, sign and mantissa are random.
template <typename Word>
void fill_values(std::byte* to, int64_t first, int64_t count, int exponent_bits) {
  const int mantissa_bits = static_cast<int>(sizeof(Word)) * 8 - 1 - exponent_bits;
  const int largest_exponent = (1 << (exponent_bits - 1)) - 2;
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t bits = mixed(static_cast<uint64_t>(first + i));
    const int below = std::countr_zero(bits | 1ULL << 40U);
    const auto exponent = static_cast<uint64_t>(std::max(largest_exponent - below, 0));
    const uint64_t sign = bits >> 63U;
    const uint64_t mantissa = (bits >> 40U) & ((1ULL << mantissa_bits) - 1);
    const auto word = static_cast<Word>(sign << (exponent_bits + mantissa_bits) |
                                        exponent << mantissa_bits | mantissa);
    std::memcpy(to + static_cast<size_t>(i) * sizeof(Word), &word, sizeof(word));
  }
}

constexpr uint64_t kLineBytes = 64;
// The processor's own prefetcher stops at the end of a page.
constexpr uint64_t kPrefetchBytes = 4096;

// Reads all lines.
uint64_t checksum(const std::byte* data, uint64_t size_bytes) {
  std::array<uint64_t, kLineBytes / sizeof(uint64_t)> sums{};
  for (uint64_t at = 0; at + kLineBytes <= size_bytes; at += kLineBytes) {
    __builtin_prefetch(data + at + kPrefetchBytes);
    std::array<uint64_t, sums.size()> words;
    std::memcpy(words.data(), data + at, sizeof(words));
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += words[i];
  }
  return std::accumulate(sums.begin(), sums.end(), uint64_t{0});
}

#if defined(__SSE2__)
// Stores lines past the caches: those of `from`, or ones. A few bytes at the ends are left out.
void stream_lines(std::byte* to, const std::byte* from, uint64_t size_bytes) {
  constexpr uint64_t kVectorBytes = sizeof(__m128i);
  const uint64_t skipped = -reinterpret_cast<uint64_t>(to) % kVectorBytes;
  if (size_bytes < skipped) return;
  to += skipped;
  if (from != nullptr) from += skipped;
  size_bytes -= skipped;
  const auto* source = reinterpret_cast<const __m128i*>(from);
  auto* target = reinterpret_cast<__m128i*>(to);
  for (uint64_t i = 0; i < size_bytes / kVectorBytes; ++i) {
    __m128i value = _mm_set1_epi8(1);
    if (source != nullptr) {
      if (i % 4 == 0) __builtin_prefetch(from + i * kVectorBytes + kPrefetchBytes);
      value = _mm_loadu_si128(source + i);
    }
    _mm_stream_si128(target + i, value);
  }
  _mm_sfence();
}
#endif

class HostMachine : public Machine {
 public:
  HostMachine() {
    facts_.name = cpu_info().model;
    facts_.num_units = num_threads();
    facts_.memory_bytes = available_memory_bytes();
    facts_.cache_bytes = cache_bytes(facts_.memory_bytes);
    facts_.stream_bytes = std::max(2 * kLeastCacheBytes, facts_.cache_bytes);
  }
  ~HostMachine() override { release(); }
  HostMachine(const HostMachine&) = delete;
  HostMachine& operator=(const HostMachine&) = delete;

  [[nodiscard]] Device device() const override { return {}; }
  [[nodiscard]] const MachineFacts& facts() const override { return facts_; }

  std::byte* reserve(uint64_t size_bytes) override {
    if (size_bytes > size_bytes_) {
      release();
      memory_ = static_cast<std::byte*>(::operator new(size_bytes, kHostAlignment));
      size_bytes_ = size_bytes;
    }
    return memory_;
  }

  void take_large_pages([[maybe_unused]] std::byte* memory,
                        [[maybe_unused]] uint64_t size_bytes) override {
#if defined(__linux__)
    constexpr uint64_t kPage = 4096;
    const uint64_t begin = reinterpret_cast<uint64_t>(memory);
    const uint64_t first = (begin + kPage - 1) / kPage * kPage;
    const uint64_t end = begin + size_bytes;
    if (first < end) madvise(memory + (first - begin), end - first, MADV_HUGEPAGE);
#endif
  }

  void fill_random(std::byte* to, DType dtype, int64_t first, int64_t count) override {
    if (dtype == DType::kBF16) fill_values<uint16_t>(to, first, count, 8);
    if (dtype == DType::kF16) fill_values<uint16_t>(to, first, count, 5);
    if (dtype == DType::kF32) fill_values<uint32_t>(to, first, count, 8);
  }
  void fill_words(std::byte* to, const RandomWords& words, uint64_t size_bytes) override {
    fill_random_words(to, 0, size_bytes, words);
  }
  void fill_bytes(std::byte* to, uint8_t value, uint64_t size_bytes) override {
    in_chunks(size_bytes,
              [&](uint64_t begin, uint64_t size) { std::memset(to + begin, value, size); });
  }
  void copy(std::byte* to, const std::byte* from, uint64_t size_bytes) override {
    queue_copy(to, from, size_bytes, {});
  }
  void write(std::byte* to, const std::byte* host, uint64_t size_bytes) override {
    std::memcpy(to, host, size_bytes);
  }
  void read(std::byte* host, const std::byte* from, uint64_t size_bytes) override {
    std::memcpy(host, from, size_bytes);
  }
  bool is_equal(const std::byte* a, const std::byte* b, uint64_t size_bytes) override {
    return std::memcmp(a, b, size_bytes) == 0;
  }

  [[nodiscard]] std::vector<TrafficShape> traffic_shapes(
      const Traffic& /*traffic*/) const override {
#if defined(__SSE2__)
    return {TrafficShape{}, TrafficShape {.is_streamed = true }};
#else
    return {TrafficShape{}};
#endif
  }
  // As much as possible is copied; the rest of the longer side is only read or only set.
  void queue_traffic(const Traffic& traffic, const TrafficShape& shape,
                     Stream /*stream*/) override {
    const uint64_t both = std::min(traffic.read_bytes, traffic.write_bytes);
    in_chunks(both, [&](uint64_t begin, uint64_t size) {
      put_lines(shape, traffic.to + begin, traffic.from + begin, size);
    });
    in_chunks(traffic.write_bytes - both, [&](uint64_t begin, uint64_t size) {
      put_lines(shape, traffic.to + both + begin, nullptr, size);
    });
    in_chunks(traffic.read_bytes - both, [&](uint64_t begin, uint64_t size) {
      checksum_ ^= checksum(traffic.from + both + begin, size);
    });
    in_chunks(traffic.exchange_write_bytes, [&](uint64_t begin, uint64_t size) {
      std::memset(traffic.exchange + begin, 1, size);
    });
    in_chunks(traffic.exchange_read_bytes, [&](uint64_t begin, uint64_t size) {
      checksum_ ^= checksum(traffic.exchange + begin, size);
    });
  }
  void queue_copy(std::byte* to, const std::byte* from, uint64_t size_bytes,
                  Stream /*stream*/) override {
    in_chunks(size_bytes,
              [&](uint64_t begin, uint64_t size) { std::memcpy(to + begin, from + begin, size); });
  }

  void wait() override {}
  double run_once(const QueuedCall& call) override {
    const auto start = std::chrono::steady_clock::now();
    call(0, {});
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - start;
    return time.count();
  }

  CallTime time_calls(const QueuedCall& call, const ReplayPlan& plan) override {
    int64_t call_idx = 0;
    const auto replay = [&](int64_t /*unused*/, Stream stream) {
      for (int64_t i = 0; i < plan.calls; ++i) call(call_idx++, stream);
    };
    run_once(replay);
    std::vector<double> us_per_call;
    double total_us = 0;
    std::clock_t least = std::numeric_limits<std::clock_t>::max();
    while (static_cast<int>(us_per_call.size()) < plan.replays ||
           total_us < 1e6 * plan.min_seconds) {
      const std::clock_t start = std::clock();
      const double replay_us = run_once(replay);
      least = std::min(least, std::clock() - start);
      total_us += replay_us;
      us_per_call.push_back(replay_us / static_cast<double>(plan.calls));
    }
    CallTime time = call_time(std::move(us_per_call), plan.calls);
    time.processor_us =
        1e6 / CLOCKS_PER_SEC * static_cast<double>(least) / static_cast<double>(plan.calls);
    return time;
  }

  int64_t count_launches(const QueuedCall& /*call*/) override { return 0; }

 private:
  void release() {
    ::operator delete(memory_, kHostAlignment);
    memory_ = nullptr;
    size_bytes_ = 0;
  }

  // Copies or, from null, sets memory.
  static void put_lines(const TrafficShape& shape, std::byte* to, const std::byte* from,
                        uint64_t size_bytes) {
#if defined(__SSE2__)
    if (shape.is_streamed) return stream_lines(to, from, size_bytes);
#endif
    from == nullptr ? std::memset(to, 1, size_bytes) : std::memcpy(to, from, size_bytes);
  }

  // Calls the body for one contiguous range of whole lines, but for the last, on each thread that
  // operations may use.
  void in_chunks(uint64_t size_bytes,
                 const std::function<void(uint64_t begin, uint64_t size)>& body) {
    constexpr uint64_t kMinChunk = 1U << 16U;
    const int threads = std::max(num_threads(), 1);
    const uint64_t lines = (size_bytes + kLineBytes - 1) / kLineBytes;
    const auto count = static_cast<uint64_t>(threads);
    const uint64_t chunk = std::max((lines + count - 1) / count * kLineBytes, kMinChunk);
    const auto run = [&](int index) {
      const uint64_t begin = static_cast<uint64_t>(index) * chunk;
      if (begin < size_bytes) body(begin, std::min(chunk, size_bytes - begin));
    };
    if (size_bytes <= chunk) return run(0);
    if (!workers_ || workers_->count() != threads) {
      workers_.reset();
      workers_.emplace(threads);
    }
    workers_->run(run);
  }

  MachineFacts facts_;
  std::optional<HostWorkers> workers_;
  std::byte* memory_ = nullptr;
  uint64_t size_bytes_ = 0;
  std::atomic<uint64_t> checksum_ = 0;  // Keeps the compiler from leaving out what is only read.
};

}  // namespace

std::unique_ptr<Machine> open_host() { return std::make_unique<HostMachine>(); }

}  // namespace narrowfloat::cli
