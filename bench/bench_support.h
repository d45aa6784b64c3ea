// What the benchmarks share: inputs, quantized tensors in memory, the memcpy that a case is
// compared with, and the program's main.
//
// A case is measured against a memcpy that moves as many bytes (half of them read, half written),
// on as many threads, alternating with it call by call, so that what else the machine does meets
// both. docs/benchmarks.md has the method and results.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include "narrowfloat/narrowfloat.h"
#include "runtime/parallel.h"
#include "tensor/element_io.h"

namespace narrowfloat::bench {

struct Shape {
  int64_t rows;
  int64_t cols;
  [[nodiscard]] int64_t elements() const { return rows * cols; }
};

// Activations of 128 tokens and two weight matrices, the larger ones beyond the caches.
inline constexpr std::array kShapes{Shape{128, 7168}, Shape{2880, 2880}, Shape{4096, 7168}};
// For implementations one by one, the slow oracle among them.
inline constexpr Shape kSmallShape{256, 2880};

using Bytes = std::vector<std::byte>;

inline Bytes make_bytes(int64_t count) { return Bytes(static_cast<size_t>(count)); }

// A bell curve like that of trained weights, standard deviation 0.02, the same in every run.
inline Bytes make_input(DType dtype, int64_t elements) {
  constexpr size_t kPeriod = 1'000'003;  // Prime, so that no row begins like another.
  static const std::vector<float> kNumbers = [] {
    std::mt19937 generator(1);
    std::normal_distribution<float> bell(0.0F, 0.02F);
    std::vector<float> numbers(kPeriod);
    for (float& number : numbers) number = bell(generator);
    return numbers;
  }();
  const int64_t element_bytes = bits(dtype) / 8;
  Bytes input = make_bytes(elements * element_bytes);
  for (int64_t done = 0; done < elements;) {
    const int64_t count = std::min<int64_t>(kPeriod, elements - done);
    narrow(dtype, kNumbers.data(), count, input.data() + done * element_bytes);
    done += count;
  }
  return input;
}

// The buffers of a quantized tensor in its default layout.
class QuantizedBuffers {
 public:
  QuantizedBuffers(FormatId format, Shape shape)
      : layout_(quantized_layout(format, shape.rows, shape.cols)),
        values_(make_bytes(layout_.values_bytes)),
        scales_(make_bytes(layout_.scales_bytes)),
        global_scale_(static_cast<size_t>(layout_.global_scales)) {}

  [[nodiscard]] QuantizedView view() {
    return layout_.bind(values_.data(), scales_.data(), global_scale_.data());
  }
  // Values, scales with their padding, and global scales.
  [[nodiscard]] int64_t size_bytes() const {
    return layout_.values_bytes + layout_.scales_bytes + 4 * layout_.global_scales;
  }
  // What a quantizer leaves out shows in a comparison.
  void poison(int byte) {
    std::fill(values_.begin(), values_.end(), static_cast<std::byte>(byte));
    std::fill(scales_.begin(), scales_.end(), static_cast<std::byte>(byte));
    std::fill(global_scale_.begin(), global_scale_.end(), static_cast<float>(byte));
  }
  // The first part whose bytes differ; empty if none.
  [[nodiscard]] std::string difference(const QuantizedBuffers& other) const {
    if (values_ != other.values_) return "values";
    if (scales_ != other.scales_) return "scales";
    const size_t bytes = global_scale_.size() * sizeof(float);
    const bool same =
        bytes == 0 || std::memcmp(global_scale_.data(), other.global_scale_.data(), bytes) == 0;
    return same ? "" : "global scales";
  }

 private:
  QuantizedLayout layout_;
  Bytes values_;
  Bytes scales_;
  std::vector<float> global_scale_;
};

// Pins an implementation of an operation while it lives; "" pins nothing.
class Pinned {
 public:
  Pinned(std::string_view op, std::string_view implementation) {
    if (implementation.empty()) return;
    setenv(kVariable, fmt::format("{}:{}", op, implementation).c_str(), 1);
  }
  ~Pinned() { unsetenv(kVariable); }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

 private:
  static constexpr const char* kVariable = "NARROWFLOAT_FORCE";
};

inline constexpr std::string_view kOracle = "cpu_reference";

// The implementations of an operation that take this problem.
inline std::vector<std::string> implementations(std::string_view op,
                                                const ExplainRequest& request) {
  std::vector<std::string> names;
  for (const Candidate& candidate : explain(op, request).candidates) {
    if (candidate.supported) names.push_back(candidate.name);
  }
  return names;
}

// The implementation that runs the problem where `implementation` ("": none) is pinned.
inline std::string chosen_implementation(std::string_view op, std::string_view implementation,
                                         const ExplainRequest& request) {
  const Pinned pinned(op, implementation);
  return explain(op, request).chosen;
}

// <op>/..., or <op>_by/<implementation>/... where one is pinned; `details` says what is between.
template <typename Case>
std::string case_name(std::string_view op, const Case& what, const std::string& details) {
  const std::string by = what.implementation.empty() ? "" : "_by/" + what.implementation;
  return fmt::format("{}{}/{}/{}x{}", op, by, details, what.shape.rows, what.shape.cols);
}

// Adds the case once for each implementation that takes it.
template <typename Case>
void add_each_implementation(std::string_view op, Case what, void (*add)(const Case&)) {
  for (const std::string& name : implementations(op, explain_request(what))) {
    what.implementation = name;
    add(what);
  }
}

inline double seconds_of(const std::function<void()>& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

inline double median(std::vector<double> numbers) {
  const auto middle = numbers.begin() + static_cast<ptrdiff_t>(numbers.size() / 2);
  std::nth_element(numbers.begin(), middle, numbers.end());
  return *middle;
}

// Moves `bytes` in all: one piece a thread, so that the C library chooses how to store it.
class Copy {
 public:
  explicit Copy(int64_t bytes) : from_(make_bytes(bytes / 2)), to_(make_bytes(bytes / 2)) { run(); }

  void run() {
    const auto size = static_cast<int64_t>(from_.size());
    const int64_t pieces = num_threads();
    parallel_for(pieces, 1, [&](int64_t begin, int64_t end) {
      const int64_t first = size * begin / pieces;
      const int64_t last = size * end / pieces;
      std::memcpy(to_.data() + first, from_.data() + first, static_cast<size_t>(last - first));
    });
    benchmark::DoNotOptimize(to_.data());
    benchmark::ClobberMemory();
  }

 private:
  Bytes from_;
  Bytes to_;
};

// Runs `call`, which moves `bytes`, in turn with a copy. The time is that of the call; GB_per_s,
// memcpy_GB_per_s and of_memcpy come from the medians, the best_ ones from the shortest times,
// which other work on the machine disturbs least.
inline void measure(benchmark::State& state, int64_t bytes, const std::function<void()>& call) {
  Copy copy(bytes);
  std::vector<double> call_seconds;
  std::vector<double> copy_seconds;
  for ([[maybe_unused]] auto iteration : state) {
    call_seconds.push_back(seconds_of(call));
    state.SetIterationTime(call_seconds.back());
    copy_seconds.push_back(seconds_of([&] { copy.run(); }));
  }
  const double gigabytes = static_cast<double>(bytes) / 1e9;
  const auto report = [&](const std::string& prefix, double call_time, double copy_time) {
    state.counters[prefix + "GB_per_s"] = gigabytes / call_time;
    state.counters[prefix + "memcpy_GB_per_s"] = gigabytes / copy_time;
    state.counters[prefix + "of_memcpy"] = copy_time / call_time;
  };
  state.counters["bytes"] = static_cast<double>(bytes);
  report("", median(call_seconds), median(copy_seconds));
  report("best_", *std::min_element(call_seconds.begin(), call_seconds.end()),
         *std::min_element(copy_seconds.begin(), copy_seconds.end()));
}

// True once the bytes of any case were wrong: the program then fails.
inline bool& any_wrong_bytes() {
  static bool wrong = false;
  return wrong;
}

// Registers a case as a benchmark. Prepared(Case) allocates and computes; check() returns what is
// wrong, bytes(), implementation() and run() are what they say. Only the case that runs is in
// memory, and it is checked once, before it is timed.
template <typename Prepared, typename Case>
void register_case(const std::string& name, const Case& the_case) {
  static std::pair<std::string, std::unique_ptr<Prepared>> current;
  const auto body = [name, the_case](benchmark::State& state) {
    if (current.first != name) {
      current.second.reset();
      current = {name, std::make_unique<Prepared>(the_case)};
      const std::string wrong = current.second->check();
      if (!wrong.empty()) {
        any_wrong_bytes() = true;
        state.SkipWithError(fmt::format("differs from {} in: {}", kOracle, wrong).c_str());
        return;
      }
    }
    state.SetLabel(current.second->implementation());
    measure(state, current.second->bytes(), [] { current.second->run(); });
  };
  benchmark::RegisterBenchmark(name.c_str(), body)->UseManualTime()->Unit(benchmark::kMillisecond);
}

// Takes --threads=N, everything else is Google Benchmark's: --benchmark_filter=REGEX,
// --benchmark_format=json, --benchmark_min_time=SECONDS, ...
inline int run_program(int argc, char** argv, const std::function<void()>& register_all) {
  std::vector<char*> arguments;
  for (int i = 0; i < argc; ++i) {
    constexpr std::string_view kThreads = "--threads=";
    const std::string_view argument = argv[i];
    if (argument.starts_with(kThreads)) {
      set_num_threads(std::atoi(argv[i] + kThreads.size()));
    } else {
      arguments.push_back(argv[i]);
    }
  }
  int count = static_cast<int>(arguments.size());
  benchmark::Initialize(&count, arguments.data());
  if (benchmark::ReportUnrecognizedArguments(count, arguments.data())) return 2;
  const BuildInfo build = build_info();
  benchmark::AddCustomContext("narrowfloat", build.version);
  benchmark::AddCustomContext("compiler", build.compiler);
  benchmark::AddCustomContext("build_type", build.build_type);
  benchmark::AddCustomContext("cpu", cpu_info().model);
  benchmark::AddCustomContext("threads", std::to_string(num_threads()));
  register_all();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  if (any_wrong_bytes()) std::fprintf(stderr, "wrong bytes: see above\n");
  return any_wrong_bytes() ? 1 : 0;
}

}  // namespace narrowfloat::bench
