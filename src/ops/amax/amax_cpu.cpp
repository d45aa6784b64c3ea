// The CPU implementations: the oracle widens row after row. The others cut the rows into parts
// for all cores and compare magnitudes as integers: cpu_baseline in portable C++, cpu_avx2 and
// cpu_avx512 with the kernels of their vector level. A maximum does not depend on the order, and
// NaN never counts (spec 4.5).
#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "formats/math_policy.h"
#include "ops/amax/amax_problem.h"
#include "ops/amax/x86/amax_kernels.h"
#include "runtime/float_environment.h"
#include "runtime/parallel.h"
#include "runtime/vector_level.h"
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

// The maximum of `count` elements; kernels: null for the portable loops.
float maximum_of_bits(const AmaxKernels* kernels, DType dtype, const void* first, int64_t count) {
  constexpr int16_t kBf16Infinity = 0x7F80;
  constexpr int16_t kF16Infinity = 0x7C00;
  constexpr int32_t kF32Infinity = 0x7F800000;
  const auto largest_of_16 = [&](int16_t infinity) {
    return static_cast<uint16_t>(kernels != nullptr
                                     ? kernels->largest_of_16(first, count, infinity)
                                     : static_cast<uint32_t>(largest_bits(first, count, infinity)));
  };
  if (dtype == DType::kBF16) return bf16_to_float(largest_of_16(kBf16Infinity));
  if (dtype == DType::kF16) return f16_to_float(largest_of_16(kF16Infinity));
  return bits_float(kernels != nullptr
                        ? kernels->largest_of_32(first, count, kF32Infinity)
                        : static_cast<uint32_t>(largest_bits(first, count, kF32Infinity)));
}

void run_with(const AmaxKernels* kernels, const AmaxProblem& problem, const AmaxArgs& args) {
  constexpr int64_t kTaskElements = 65536;
  const int64_t grain = row_grain(kTaskElements, problem.cols);
  const uint32_t bits = parallel_max(problem.rows, grain, [&](int64_t begin, int64_t end) {
    uint32_t largest = 0;
    for (int64_t row = begin; row < end; ++row) {
      const void* first = element_pointer(args.input, problem.input, row * args.input_stride);
      const float maximum = maximum_of_bits(kernels, problem.input, first, problem.cols);
      if (problem.per_row) args.output[row] = maximum;
      largest = std::max(largest, float_bits(maximum));
    }
    return largest;
  });
  if (!problem.per_row) args.output[0] = bits_float(bits);
}

void run_baseline(const AmaxProblem& problem, const AmaxArgs& args, Stream /*stream*/) {
  run_with(nullptr, problem, args);
}

Support supports(const AmaxProblem& problem) { return cpu_only(problem.device); }

#if defined(NARROWFLOAT_VECTOR_LEVELS)

template <VectorLevel kLevel>
Support supports_level(const AmaxProblem& problem) {
  return cpu_with(problem.device, kLevel);
}

template <VectorLevel kLevel>
void run_level(const AmaxProblem& problem, const AmaxArgs& args, Stream /*stream*/) {
  run_with(kLevel == VectorLevel::kAvx2 ? &kAmaxKernelsAvx2 : &kAmaxKernelsAvx512, problem, args);
}

#endif

}  // namespace

const AmaxImpl kAmaxCpuReference{"cpu_reference", supports, run_reference};
const AmaxImpl kAmaxCpuBaseline{"cpu_baseline", supports, run_baseline};
#if defined(NARROWFLOAT_VECTOR_LEVELS)
const AmaxImpl kAmaxCpuAvx2{"cpu_avx2", supports_level<VectorLevel::kAvx2>,
                            run_level<VectorLevel::kAvx2>};
const AmaxImpl kAmaxCpuAvx512{"cpu_avx512", supports_level<VectorLevel::kAvx512>,
                              run_level<VectorLevel::kAvx512>};
#endif

}  // namespace narrowfloat
