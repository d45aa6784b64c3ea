// QuantizeActivationsProblem describes a call that quantizes activation rows (see
// quantize_problem.h).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "moe_shared/quantize_activations.h"
#include "runtime/support.h"

namespace narrowfloat {

struct QuantizeActivationsProblem {
  DType input = DType::kBF16;
  RowFormat format = RowFormat::kFp8Group;
  RowChoice choice = RowChoice::kAll;
  Device device;
  int64_t input_rows = 0;
  int64_t rows = 0;  // Rows of the output.
  int64_t cols = 0;
  bool per_expert = false;
};
std::string to_string(const QuantizeActivationsProblem& problem);

struct QuantizeActivationsImpl {
  std::string_view name;
  Support (*supports)(const QuantizeActivationsProblem& problem);
  void (*run)(const QuantizeActivationsProblem& problem, const QuantizeActivationsArgs& args,
              Stream stream);
};

// Ordered, fastest first. RowEncoder, which the CPU's implementation applies, defines the rules.
std::span<const QuantizeActivationsImpl> quantize_activations_impls();
extern const QuantizeActivationsImpl kQuantizeActivationsCpuBaseline;
// The entries below exist in builds with CUDA.
extern const QuantizeActivationsImpl kQuantizeActivationsSm90Groups;
extern const QuantizeActivationsImpl kQuantizeActivationsSm80Groups;
extern const QuantizeActivationsImpl kQuantizeActivationsSm90TokenRows;
extern const QuantizeActivationsImpl kQuantizeActivationsSm80TokenRows;

}  // namespace narrowfloat
