// A search for maxima as data (see quantize_problem.h).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "narrowfloat/quantize.h"
#include "runtime/support.h"

namespace narrowfloat {

struct AmaxProblem {
  DType input = DType::kBF16;
  Device device;
  int64_t rows = 0;
  int64_t cols = 0;
  bool per_row = false;
};
std::string to_string(const AmaxProblem& problem);

struct AmaxArgs {
  const void* input = nullptr;
  int64_t input_stride = 0;  // In elements.
  float* output = nullptr;
};

struct AmaxImpl {
  std::string_view name;
  Support (*supports)(const AmaxProblem& problem);
  void (*run)(const AmaxProblem& problem, const AmaxArgs& args, Stream stream);
};

// Ordered, fastest first, the oracle last.
std::span<const AmaxImpl> amax_impls();
extern const AmaxImpl kAmaxCpuReference;
extern const AmaxImpl kAmaxCpuBaseline;
extern const AmaxImpl kAmaxCpuAvx2;  // Only in builds with vector levels, like the next.
extern const AmaxImpl kAmaxCpuAvx512;
extern const AmaxImpl kAmaxSm90;  // Only in builds with CUDA, like the next.
extern const AmaxImpl kAmaxSm80;

}  // namespace narrowfloat
