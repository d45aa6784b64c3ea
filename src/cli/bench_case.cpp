// Method: wall clock, one run to warm up, then runs until `min_seconds` have passed and at least
// five, the median of them. memcpy gets as many threads as the operation. The result of the last
// timed run is compared byte by byte with one run of cpu_reference.
#include "cli/bench_case.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "cli/forced_implementation.h"
#include "cli/timing.h"
#include "narrowfloat/error.h"
#include "narrowfloat/quantize.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat::cli {
namespace {

using Bytes = std::vector<std::byte>;

// Values that are uniform in [-2^-6, 2^-6], as a weight's are in size, made from their bits: the
// exponent is geometric, sign and mantissa are random.
template <typename Word>
void fill_floats(Bytes& out, int exponent_bits, int mantissa_bits) {
  std::mt19937_64 random(1);
  const int largest_exponent = (1 << (exponent_bits - 1)) - 2 - 6;
  for (size_t at = 0; at < out.size(); at += sizeof(Word)) {
    const uint64_t bits = random();
    const int below = std::countr_zero(bits | 1ULL << 40U);
    const auto exponent = static_cast<uint64_t>(std::max(largest_exponent - below, 0));
    const uint64_t sign = bits >> 63U;
    const uint64_t mantissa = (bits >> 40U) & ((1ULL << mantissa_bits) - 1);
    const auto word = static_cast<Word>(sign << (exponent_bits + mantissa_bits) |
                                        exponent << mantissa_bits | mantissa);
    std::memcpy(out.data() + at, &word, sizeof(word));
  }
}

// The same matrix on every call: cases are compared with each other.
Bytes random_matrix(const BenchProblem& problem) {
  const TensorView shape =
      TensorView::contiguous(nullptr, problem.dtype, {problem.rows, problem.cols});
  Bytes out(static_cast<size_t>(shape.num_elements()) *
            static_cast<size_t>(bits(problem.dtype) / 8));
  if (problem.dtype == DType::kBF16) fill_floats<uint16_t>(out, 8, 7);
  if (problem.dtype == DType::kF16) fill_floats<uint16_t>(out, 5, 10);
  if (problem.dtype == DType::kF32) fill_floats<uint32_t>(out, 8, 23);
  return out;
}

// A quantized matrix that owns its buffers.
struct QuantizedBuffers {
  explicit QuantizedBuffers(const QuantizedLayout& layout_of_buffers)
      : layout(layout_of_buffers),
        values(static_cast<size_t>(layout.values_bytes)),
        scales(static_cast<size_t>(layout.scales_bytes)),
        global_scale(static_cast<size_t>(layout.global_scales)) {}

  QuantizedView view() { return layout.bind(values.data(), scales.data(), global_scale.data()); }
  [[nodiscard]] uint64_t size_bytes() const {
    return values.size() + scales.size() + global_scale.size() * sizeof(float);
  }
  bool operator==(const QuantizedBuffers& other) const {
    // Scales are never NaN here, so equal floats are equal bytes but for the sign of zero.
    return values == other.values && scales == other.scales && global_scale == other.global_scale;
  }

  QuantizedLayout layout;
  Bytes values;
  Bytes scales;
  std::vector<float> global_scale;
};

// Reads size_bytes / 2 and writes as many, split over the threads that operations may use.
double time_memcpy(uint64_t size_bytes, double min_seconds) {
  const size_t size = size_bytes / 2;
  const Bytes source(size, std::byte{1});
  Bytes target(size);
  const auto num_threads_used = static_cast<size_t>(std::max(num_threads(), 1));
  const size_t share = (size + num_threads_used - 1) / num_threads_used;
  const auto copy_part = [&](size_t part) {
    const size_t begin = std::min(part * share, size);
    const size_t end = std::min(begin + share, size);
    std::memcpy(target.data() + begin, source.data() + begin, end - begin);
  };
  const auto copy_all = [&] {
    std::vector<std::jthread> threads;
    for (size_t part = 1; part < num_threads_used; ++part) threads.emplace_back(copy_part, part);
    copy_part(0);
  };
  return time_runs(copy_all, min_seconds).median_seconds;
}

BenchResult result_of(const Timing& timing, uint64_t size_bytes, bool is_correct) {
  BenchResult result;
  result.size_bytes = size_bytes;
  result.num_runs = timing.num_runs;
  result.median_seconds = timing.median_seconds;
  result.is_correct = is_correct;
  return result;
}

ExplainRequest explain_request(const BenchProblem& problem) {
  ExplainRequest request;
  request.format = problem.format;
  request.math = problem.math;
  request.dtype = problem.dtype;
  request.rows = problem.rows;
  request.cols = problem.cols;
  return request;
}

// Encode scales come from the tensor's maximum, as in a first-time quantization.
BenchResult bench_quantize(const BenchProblem& problem) {
  const Bytes input = random_matrix(problem);
  const TensorView input_view =
      TensorView::contiguous(input.data(), problem.dtype, {problem.rows, problem.cols});
  const QuantizedLayout layout = quantized_layout(problem.format, problem.rows, problem.cols);
  QuantizeOptions options;
  options.math = problem.math;
  QuantizedBuffers output(layout);
  const Timing timing =
      time_runs([&] { quantize(input_view, output.view(), options); }, problem.min_seconds);
  QuantizedBuffers expected(layout);
  const ForcedImplementation forced(problem.op, "cpu_reference");
  quantize(input_view, expected.view(), options);
  return result_of(timing, input.size() + output.size_bytes(), output == expected);
}

// From the values that quantization makes of the same matrix; back to the same type.
BenchResult bench_dequantize(const BenchProblem& problem) {
  const Bytes original = random_matrix(problem);
  QuantizedBuffers input(quantized_layout(problem.format, problem.rows, problem.cols));
  quantize(TensorView::contiguous(original.data(), problem.dtype, {problem.rows, problem.cols}),
           input.view());
  Bytes output(original.size());
  const auto run_into = [&](Bytes& bytes) {
    dequantize(input.view(),
               TensorView::contiguous(bytes.data(), problem.dtype, {problem.rows, problem.cols}));
  };
  const Timing timing = time_runs([&] { run_into(output); }, problem.min_seconds);
  Bytes expected(original.size());
  const ForcedImplementation forced(problem.op, "cpu_reference");
  run_into(expected);
  return result_of(timing, input.size_bytes() + output.size(), output == expected);
}

}  // namespace

double BenchResult::gb_per_second() const {
  return billions_per_second(static_cast<double>(size_bytes), median_seconds);
}

double BenchResult::memcpy_gb_per_second() const {
  return billions_per_second(static_cast<double>(size_bytes), memcpy_seconds);
}

BenchResult run_bench(const BenchProblem& problem) {
  // The operation first, memcpy right after: both see the machine in the same state.
  BenchResult result =
      problem.op == "quantize" ? bench_quantize(problem) : bench_dequantize(problem);
  result.implementation = explain(problem.op, explain_request(problem)).chosen;
  result.memcpy_seconds = time_memcpy(result.size_bytes, problem.min_seconds);
  return result;
}

}  // namespace narrowfloat::cli
