// Times of expert parallelism on the ranks of allreduce_ranks.h: dispatch() and combine() alone,
// and with a layer between them. Outputs are compared in the same run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench_cli/allreduce_measure.h"
#include "cli_common/moe/layer_config.h"
#include "narrowfloat/expert_parallel.h"

namespace narrowfloat::cli {

struct ExpertRow {
  int64_t tokens = 0;  // Every rank has so many.
  RowFormat payload = RowFormat::kBf16;
  CombineOrder order = CombineOrder::kRank;
};

// Times are those of the slowest rank; 0: not measured.
struct ExpertResult {
  double exchange_us = 0;    // dispatch() and combine().
  double layer_us = 0;       // run().
  double all_reduce_us = 0;  // NCCL's, of as many bf16 rows as all ranks have.
  double sent_rows = 0;      // Mean over the tokens of all ranks.
  ExpertTransport transport = ExpertTransport::kAuto;  // The one that the ranks have.
  bool is_wrong = false;
  char message[256] = {};
};

struct ExpertSettings {
  RankSetup setup;
  MoeShape shape;
  MoeMode mode = MoeMode::kBf16;
  bool has_layer = true;
  ExpertTransport transport = ExpertTransport::kAuto;
  MeasureOptions measure;
};

struct MeasuredExperts {
  RunFacts facts;
  std::vector<ExpertResult> rows;
};

// Throws the error of the rank that failed first.
MeasuredExperts measure_experts(const ExpertSettings& settings, const std::vector<ExpertRow>& rows);

}  // namespace narrowfloat::cli
