// A prepared MoE layer on a GPU with everything its runs read and write, in the memory of a
// Machine: what moe run and moe bench time with --device cuda.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cli/bench/machine.h"
#include "cli/moe/random_layer.h"
#include "cli/timing.h"
#include "narrowfloat/moe_tuning.h"

namespace narrowfloat::cli {

// Null for the CPU, which layers need no machine for.
std::unique_ptr<Machine> open_layer_machine(Device device);

// Tokens [begin, begin + count).
struct TokenRange {
  int64_t begin = 0;
  int64_t count = 0;
};

class GpuLayer {
 public:
  // Takes the machine's memory; keeps nothing of `weights`.
  GpuLayer(Machine& machine, const MoeWeights& weights, const MoeConfig& config);
  // The tensors of random words are made on the GPU.
  GpuLayer(Machine& machine, const RandomWeights& weights, const MoeConfig& config);

  // Dense rows [T, H] and their routing in host memory, which stays, for runs on ranges of up to
  // `max_tokens` of them.
  void load(const TensorView& rows, const Routing& routing, int64_t max_tokens);
  // Token tiles of later runs.
  void take(const MoeTuning& tuning);

  // Runs it and waits; returns microseconds, with the launches.
  double run(TokenRange range);
  // Of the last run, or of the last range of time_runs().
  [[nodiscard]] std::vector<float> output() const;
  [[nodiscard]] std::vector<int32_t> ids() const;

  // Graphs of runs on these ranges, one after another, until `min_seconds` have passed. Times are
  // those of a run in the mean over the ranges. Outputs are poisoned before. Runs end behind
  // `last`.
  Timing time_runs(const std::vector<TokenRange>& ranges, double min_seconds,
                   MoeStage last = MoeStage::kCombine);
  [[nodiscard]] int64_t count_launches(TokenRange range, MoeStage last = MoeStage::kCombine);
  [[nodiscard]] int32_t token_tile(int64_t tokens) const { return layer_.token_tile(tokens); }

 private:
  void queue(TokenRange range, Stream stream, MoeStage last) const;

  Machine& machine_;
  MoeLayer layer_;
  TensorView host_rows_;
  Routing host_routing_;
  int64_t max_tokens_ = 0;  // 0: nothing is loaded.
  TensorView rows_;
  Routing routing_;
  std::byte* out_ = nullptr;
  std::byte* ids_ = nullptr;
  TensorView workspace_;
  int64_t tokens_ = 0;  // Of the last run.
};

}  // namespace narrowfloat::cli
