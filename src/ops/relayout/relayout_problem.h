// A change of scale layout as data (see quantize_problem.h).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "narrowfloat/quantize.h"
#include "runtime/support.h"

namespace narrowfloat {

struct RelayoutProblem {
  ScaleType type = ScaleType::kE4M3;
  ScaleLayoutId from = ScaleLayoutId::kLinear;
  ScaleLayoutId to = ScaleLayoutId::kLinear;
  Device device;
  int64_t batch = 1;
  int64_t rows = 0;
  int64_t blocks = 0;
};
std::string to_string(const RelayoutProblem& problem);

struct RelayoutArgs {
  const void* input = nullptr;
  void* output = nullptr;
  int64_t input_scales = 0;  // Scales per batch.
  int64_t output_scales = 0;
};

struct RelayoutImpl {
  std::string_view name;
  Support (*supports)(const RelayoutProblem& problem);
  void (*run)(const RelayoutProblem& problem, const RelayoutArgs& args, Stream stream);
};

// Ordered, fastest first, the oracle last.
std::span<const RelayoutImpl> relayout_impls();
extern const RelayoutImpl kRelayoutCpuReference;
extern const RelayoutImpl kRelayoutCpuBaseline;
extern const RelayoutImpl kRelayoutSm90;  // Only in builds with CUDA, like the next.
extern const RelayoutImpl kRelayoutSm80;

}  // namespace narrowfloat
