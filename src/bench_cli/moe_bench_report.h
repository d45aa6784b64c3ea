// The options of `narrowfloat-bench moe bench`, its results, and the report that it prints.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bench_cli/measure.h"
#include "cli_common/moe/layer_config.h"
#include "cli_common/moe/layer_inputs.h"
#include "cli_common/output.h"

namespace narrowfloat::cli {

struct MoeBenchArguments {
  OutputArguments output;
  LayerArguments layer;
  Device device;
  std::vector<int64_t> tokens = {1, 8, 64, 512};
  std::string routing = "uniform";  // Or "zipf", or a file.
  uint64_t max_memory_bytes = 0;    // 0: six tenths of what is available.
  std::optional<int32_t> token_tile;
  bool fast_sums = false;
  std::string tuning;  // A file; empty: the rule.
  bool has_stages = false;
  int num_threads = 0;
  double min_seconds = 0.5;
  double rest_seconds = 0;  // Before each case.
  std::string commit;
};

// A stage takes as long as a run to its end takes longer than one to the end of the stage before.
struct StageTime {
  MoeStage stage = MoeStage::kRoute;
  double median_us = 0;
  int64_t launches = 0;  // On a GPU.
};

struct MoeBenchResult {
  int64_t tokens = 0;
  int32_t token_tile = 0;
  // Means over the timed runs, which are on different tokens, and the most tokens that one expert
  // had.
  double experts_hit = 0;
  double local_slots = 0;
  int64_t largest_load = 0;
  LayerWork work;
  CallTime time;
  int64_t launches = 0;  // In a run on a GPU.
  std::vector<StageTime> stages;
  CheckedRun check;
};

struct ModeResults {
  MoeConfig config;
  std::string implementation;  // The first GEMM's.
  std::vector<MoeBenchResult> cases;
};

struct MoeBenchReport {
  MoeShape shape;
  MachineFacts machine;
  bool is_on_gpu = false;
  MachineRates rates;  // On the CPU: read_gb_per_s alone.
  std::vector<ModeResults> modes;
  std::vector<std::string> notes;
};

// Prints to stdout, in the form that the arguments ask for.
void print_report(const MoeBenchArguments& arguments, const MoeBenchReport& report);

}  // namespace narrowfloat::cli
