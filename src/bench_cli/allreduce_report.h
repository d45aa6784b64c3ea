// The arguments of narrowfloat-bench allreduce, and the forms in which it prints its results.
#pragma once

#include <string>
#include <vector>

#include "bench_cli/allreduce_measure.h"
#include "cli_common/output.h"

namespace narrowfloat::cli {

struct AllReduceArguments {
  OutputArguments output;
  RankSetup setup;
  struct Shape {
    int64_t tokens = 0;
    int64_t hidden = 0;
  };
  std::vector<Shape> shapes;
  std::vector<AllReducePattern> patterns = {AllReducePattern::kAllReduce};
  bool has_processes = false;     // Ranks on the CPU are processes.
  bool has_all_patterns = false;  // Those that a shape cannot have are left out.
  std::vector<ScaleLayoutId> layouts = {ScaleLayoutId::kSwizzled128x4};
  int group = 128;
  AllReduceQuantization moe_quantization = AllReduceQuantization::kNone;
  AllReduceAlgorithm algorithm = AllReduceAlgorithm::kAuto;
  AllReduceAccumulation accumulation = AllReduceAccumulation::kFp32;
  MeasureOptions measure;
  int64_t soak_calls = 0;  // 0: rows are measured.
  int kill_rank = -1;
  std::string commit;
};

void print_rows(const AllReduceArguments& arguments, const std::vector<AllReduceRow>& rows,
                const MeasuredRows& measured);
// `verdict` is empty where all is well.
void print_soak(const AllReduceArguments& arguments, const SoakOutcome& outcome,
                const std::string& verdict);

}  // namespace narrowfloat::cli
