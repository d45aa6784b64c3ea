// Coding of rows as data (see quantize_problem.h).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "ops/code_rows/code_rows.h"
#include "runtime/support.h"

namespace narrowfloat {

struct CodeRowsProblem {
  DType input = DType::kBF16;
  RowFormat format = RowFormat::kFp8Group;
  RowChoice choice = RowChoice::kAll;
  Device device;
  int64_t input_rows = 0;
  int64_t rows = 0;  // Of the output.
  int64_t cols = 0;
  bool per_expert = false;
};
std::string to_string(const CodeRowsProblem& problem);

struct CodeRowsImpl {
  std::string_view name;
  Support (*supports)(const CodeRowsProblem& problem);
  void (*run)(const CodeRowsProblem& problem, const CodeRowsArgs& args, Stream stream);
};

// Ordered, fastest first. The rules are those of RowEncoder, which the CPU's implementation
// applies.
std::span<const CodeRowsImpl> code_rows_impls();
extern const CodeRowsImpl kCodeRowsCpuBaseline;
// In builds with CUDA.
extern const CodeRowsImpl kCodeRowsSm90Groups;
extern const CodeRowsImpl kCodeRowsSm90TokenRows;

}  // namespace narrowfloat
