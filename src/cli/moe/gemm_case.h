// Measurements of `narrowfloat moe gemm`: one grouped GEMM of random weights and rows, timed, and a
// sample of its rows compared with fp64 sums of the same codes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cli/bench/machine.h"
#include "cli/moe/bench_check.h"
#include "narrowfloat/moe.h"

namespace narrowfloat::cli {

// rows [rows, k] times weights [groups, n, k]; rows are spread evenly over the groups.
struct GemmShape {
  int64_t n = 0;
  int64_t k = 0;
  int32_t groups = 0;
};

struct GemmProblem {
  GemmShape shape;
  MoeMode mode = MoeMode::kFp8Block;
  int64_t rows = 0;
  std::optional<int32_t> token_tile;  // Default: default_token_tile().
  double min_seconds = 0.5;
};

struct GemmResult {
  int32_t token_tile = 0;
  std::string implementation;
  CallTime time;
  double weight_bytes = 0;  // Of the groups that have rows.
  double flops = 0;
  CheckedRun check;
};

GemmResult measure_gemm(Machine& machine, const GemmProblem& problem);

}  // namespace narrowfloat::cli
