// Both CPU implementations: the oracle widens row after row, the baseline runs rows in parallel and
// compares magnitudes as integers. A maximum does not depend on the order, and NaN never counts
// (spec 4.5).
#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "formats/math_policy.h"
#include "ops/amax/amax_problem.h"
#include "runtime/float_environment.h"
#include "runtime/parallel.h"
#include "tensor/element_io.h"

namespace narrowfloat {
namespace {

constexpr int64_t kAmaxChunk = 512;

float row_maximum(const AmaxProblem& problem, const AmaxArgs& args, int64_t row) {
  AbsMax amax;
  std::array<float, kAmaxChunk> x;
  for (int64_t col = 0; col < problem.cols; col += kAmaxChunk) {
    const int64_t n = std::min(kAmaxChunk, problem.cols - col);
    widen(problem.input, element_pointer(args.input, problem.input, row * args.input_stride + col),
          n, x.data());
    amax.add(x.data(), n);
  }
  return amax.or_zero();
}

void run_reference(const AmaxProblem& problem, const AmaxArgs& args, Stream /*stream*/) {
  const FloatEnvironmentGuard guard;
  float tensor = 0.0F;
  for (int64_t row = 0; row < problem.rows; ++row) {
    const float maximum = row_maximum(problem, args, row);
    if (problem.per_row) args.output[row] = maximum;
    tensor = std::max(tensor, maximum);
  }
  if (!problem.per_row) args.output[0] = tensor;
}

// The largest magnitude as its bits, whose order is that of integers; those above the bits of
// infinity are NaN. Compilers use vector instructions for it.
template <typename Bits>
Bits largest_bits(const void* elements, int64_t count, Bits infinity) {
  const auto* x = static_cast<const std::byte*>(elements);
  constexpr Bits kMagnitude = std::numeric_limits<Bits>::max();
  Bits largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    Bits stored{};
    std::memcpy(&stored, x + static_cast<size_t>(i) * sizeof(Bits), sizeof(Bits));
    const auto magnitude = static_cast<Bits>(stored & kMagnitude);
    const Bits number = magnitude > infinity ? Bits{0} : magnitude;
    largest = number > largest ? number : largest;
  }
  return largest;
}

float row_maximum_of_bits(const AmaxProblem& problem, const AmaxArgs& args, int64_t row) {
  const void* const first = element_pointer(args.input, problem.input, row * args.input_stride);
  switch (problem.input) {
    case DType::kBF16:
      return bf16_to_float(
          static_cast<uint16_t>(largest_bits<int16_t>(first, problem.cols, 0x7F80)));
    case DType::kF16:
      return f16_to_float(
          static_cast<uint16_t>(largest_bits<int16_t>(first, problem.cols, 0x7C00)));
    default:
      return bits_float(
          static_cast<uint32_t>(largest_bits<int32_t>(first, problem.cols, 0x7F800000)));
  }
}

void run_baseline(const AmaxProblem& problem, const AmaxArgs& args, Stream /*stream*/) {
  constexpr int64_t kTaskElements = 65536;
  const int64_t grain = row_grain(kTaskElements, problem.cols);
  const uint32_t bits = parallel_max(problem.rows, grain, [&](int64_t begin, int64_t end) {
    uint32_t largest = 0;
    for (int64_t row = begin; row < end; ++row) {
      const float maximum = row_maximum_of_bits(problem, args, row);
      if (problem.per_row) args.output[row] = maximum;
      largest = std::max(largest, float_bits(maximum));
    }
    return largest;
  });
  if (!problem.per_row) args.output[0] = bits_float(bits);
}

Support supports(const AmaxProblem& problem) { return cpu_only(problem.device); }

}  // namespace

const AmaxImpl kAmaxCpuReference{"cpu_reference", supports, run_reference};
const AmaxImpl kAmaxCpuBaseline{"cpu_baseline", supports, run_baseline};

}  // namespace narrowfloat
