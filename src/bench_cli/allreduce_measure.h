// Rows of narrowfloat-bench allreduce: one problem, timed on all ranks, with every byte of every
// rank's outputs compared with the oracle's; and a soak: random calls on one workspace, each
// compared.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench_cli/allreduce_ranks.h"
#include "bench_cli/allreduce_tensors.h"

namespace narrowfloat::cli {

struct AllReduceRow {
  AllReduceProblem problem;
  bool is_baseline = false;  // NCCL beside the others: left out where there is none.
};

struct MeasureOptions {
  double min_seconds = 0.5;
  bool is_programmatic = false;
};

// One rank's result, in memory that processes share.
struct RankResult {
  enum class Status : int { kNotRun, kMeasured, kLeftOut, kFailed };
  Status status = Status::kNotRun;
  ErrorKind error{};
  AllReduceAlgorithm algorithm = AllReduceAlgorithm::kAuto;
  CallTime time;
  double memory_only_us = 0;  // Virtual ranks: the same bytes moved, nothing computed.
  int64_t buffer_sets = 0;
  bool is_inexact = false;  // The outputs are not the oracle's, byte for byte.
  bool is_wrong = false;    // Nor are they near enough, where the algorithm defines no bytes.
  char message[512] = {};
};

// All ranks' results of one row.
struct RowResult {
  std::vector<RankResult> ranks;

  // The rank that took the longest; of those that failed, the first.
  [[nodiscard]] const RankResult& slowest() const;
  [[nodiscard]] bool is_measured() const;
  [[nodiscard]] bool is_exact() const;
  [[nodiscard]] bool is_correct() const;
};

// The machine and the engines of the ranks, as rank 0 sees them.
struct RunFacts {
  char machine[128] = {};
  char driver[64] = {};
  char cuda_runtime[32] = {};
  char nccl[32] = {};  // Its version where the workspaces have it.
  AllReduceTransport transport = AllReduceTransport::kAuto;
};

RunFacts facts_of(const LocalRanks& ranks);

struct MeasuredRows {
  RunFacts facts;
  std::vector<RowResult> rows;
};

// Runs the ranks and measures all rows on them. Throws what ended the ranks; a row that nothing can
// run has that as its result.
MeasuredRows measure_rows(const RankSetup& setup, const std::vector<AllReduceRow>& rows,
                          const MeasureOptions& options);

struct SoakOptions {
  int64_t calls = 100'000;
  int64_t most_tokens = 64;
  int64_t hidden = 7168;
  DType element = DType::kBF16;
  std::vector<AllReducePattern> patterns;
  int kill_rank = -1;  // This process kills itself after half of the calls.
};

struct SoakResult {
  int64_t calls = 0;
  int64_t problems = 0;        // Different problems, with inputs and outputs of their own.
  int64_t algorithms[6] = {};  // Calls by AllReduceAlgorithm, as they ran.
  double seconds = 0;
  double kill_seconds = 0;  // When the rank killed itself, on steady_seconds().
  char message[512] = {};   // Names the first fault; empty without one.
};
// One result for each body, and how the bodies ended, which is the point of kill_rank.
struct SoakOutcome {
  RunFacts facts;
  std::vector<SoakResult> results;
  std::vector<RankEnd> ends;
};
// Random calls of random problems on one workspace: the outputs of every call are compared with the
// oracle's on every rank, and the first token of every problem of a pattern, alone or among others,
// must give the same bytes. Ranks now and then sleep for a moment, each at its own times.
SoakOutcome run_soak(const RankSetup& setup, const SoakOptions& options);

}  // namespace narrowfloat::cli
