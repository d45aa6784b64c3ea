// One measurement of `narrowfloat bench`: an operation on one format, timed, beside a memcpy of as
// many bytes, and its result compared with that of the reference implementation.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "narrowfloat/format.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat::cli {

struct BenchProblem {
  std::string_view op;  // "quantize" or "dequantize"
  FormatId format = FormatId::kNvfp4;
  int64_t rows = 0;
  int64_t cols = 0;
  DType dtype = DType::kBF16;
  MathMode math = MathMode::kExact;
  double min_seconds = 0.5;
};

struct BenchResult {
  std::string implementation;
  uint64_t size_bytes = 0;  // Read and written by one run.
  int64_t num_runs = 0;
  double median_seconds = 0;
  double memcpy_seconds = 0;  // Median as well: half of size_bytes read, half written.
  bool is_correct = false;    // All bytes as cpu_reference makes them.

  [[nodiscard]] double gb_per_second() const;
  [[nodiscard]] double memcpy_gb_per_second() const;
};

BenchResult run_bench(const BenchProblem& problem);

}  // namespace narrowfloat::cli
