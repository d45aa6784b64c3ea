// An activation with requantization as data (see quantize_problem.h).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "narrowfloat/activation.h"
#include "runtime/support.h"

namespace narrowfloat {

struct ActivationProblem {
  ActivationKind kind = ActivationKind::kSwiglu;
  GateOrder gate_order = GateOrder::kUpGate;
  DType input = DType::kF32;
  RowFormat format = RowFormat::kBf16;
  Device device;
  int64_t slots = 0;
  int64_t rows = 0;
  int64_t inter = 0;        // I
  int64_t input_cols = 0;   // F1
  bool per_expert = false;  // Some parameter has a value per expert.
  bool has_num_rows = false;
  bool has_row_to_slot = false;
  bool has_wide_strides = false;  // Some stride of scales needs more than 32 bits.
};
std::string to_string(const ActivationProblem& problem);

struct ActivationArgs {
  CodedRows input;  // Scale strides resolved, on the CPU.
  CodedRows output;
  Activation activation;
  PerExpert multiplier;
  const int32_t* slot_to_row = nullptr;
  const int32_t* tile_to_expert = nullptr;
  int32_t token_tile = 0;
  const int32_t* num_rows = nullptr;
  const int32_t* row_to_slot = nullptr;
  int64_t experts = 0;  // Experts of the parameters with a value per expert.
};

struct ActivationImpl {
  std::string_view name;
  Support (*supports)(const ActivationProblem& problem);
  void (*run)(const ActivationProblem& problem, const ActivationArgs& args, Stream stream);
};

// Ordered, fastest first, the oracle last.
std::span<const ActivationImpl> activation_impls();
extern const ActivationImpl kActivationCpuReference;
extern const ActivationImpl kActivationCpuBaseline;
extern const ActivationImpl kActivationCpuAvx2;    // Only in builds for x86-64.
extern const ActivationImpl kActivationCpuAvx512;  // Only in builds for x86-64.
// The entries below exist in builds with CUDA.
extern const ActivationImpl kActivationSm90Swiglu;
extern const ActivationImpl kActivationSm80Swiglu;
extern const ActivationImpl kActivationSm90Portable;
extern const ActivationImpl kActivationSm80Portable;
extern const ActivationImpl kActivationSm90TokenRows;
extern const ActivationImpl kActivationSm80TokenRows;

}  // namespace narrowfloat
