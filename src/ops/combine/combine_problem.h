// A combine (FlashInfer's finalize) as data (see quantize_problem.h).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "narrowfloat/combine.h"
#include "runtime/support.h"

namespace narrowfloat {

struct CombineProblem {
  DType slot_rows = DType::kBF16;
  DType weights = DType::kF32;  // Counts where has_weights.
  bool has_weights = true;
  DType output = DType::kBF16;
  Device device;
  int64_t tokens = 0;
  int64_t rows = 0;    // Rows of slot_rows.
  int64_t slots = 0;   // Slots per token.
  int64_t hidden = 0;  // Columns of slot_rows.
  int64_t cols = 0;    // Columns of the output.
};
std::string to_string(const CombineProblem& problem);

struct CombineArgs {
  const void* slot_rows = nullptr;       // [rows, hidden]
  const int32_t* slot_to_row = nullptr;  // [tokens * slots]: -1, or a row.
  const void* weights = nullptr;         // [tokens * slots] or null.
  void* output = nullptr;                // [tokens, cols]
  int64_t output_stride = 0;             // In elements.
  // GPU: slot_to_row and weights can be read before the wait for previous kernels
  // (runtime/cuda/kernel_chain.h).
  bool maps_are_complete = false;
};

// combine() in a layer, which knows that.
void combine_in_layer(const TensorView& slot_rows, const TensorView& slot_to_row,
                      const TensorView& weights, const TensorView& out, bool maps_are_complete,
                      Stream stream);

struct CombineImpl {
  std::string_view name;
  Support (*supports)(const CombineProblem& problem);
  void (*run)(const CombineProblem& problem, const CombineArgs& args, Stream stream);
};

// Ordered, fastest first, the oracle last.
std::span<const CombineImpl> combine_impls();
extern const CombineImpl kCombineCpuReference;
extern const CombineImpl kCombineCpuBaseline;
extern const CombineImpl kCombineCpuAvx2;  // Only in builds for x86-64, like the next.
extern const CombineImpl kCombineCpuAvx512;
extern const CombineImpl kCombineSm90;  // Only in builds with CUDA, like the next.
extern const CombineImpl kCombineSm80;

}  // namespace narrowfloat
