// A prepared MoE layer with everything its runs read and write, in the memory of a machine.
// Commands run it once, to look at the result, or time it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "cli_common/moe/layer_inputs.h"
#include "cli_common/moe/random_weights.h"
#include "cli_common/timing/machine.h"
#include "narrowfloat/moe_tuning.h"

namespace narrowfloat::cli {

class LayerRunner {
 public:
  // Takes the memory of `machine`, which has to outlive it; keeps nothing of `weights`.
  LayerRunner(Machine& machine, const MoeWeights& weights, const MoeConfig& config);
  // The machine makes the tensors of random words itself.
  LayerRunner(Machine& machine, const RandomWeights& weights, const MoeConfig& config);
  // The layer is prepared already, on the device of `machine`.
  LayerRunner(Machine& machine, MoeLayer layer) : machine_(machine), layer_(std::move(layer)) {}

  [[nodiscard]] const MoeLayer& layer() const { return layer_; }
  [[nodiscard]] const MoeConfig& config() const { return layer_.config(); }

  // Takes dense rows [T, H] and their routing in host memory, which stays, for runs on ranges of up
  // to `max_tokens` of them.
  void load(const TensorView& rows, const Routing& routing, int64_t max_tokens);
  // Sets the token tiles of later runs.
  void take(const MoeTuning& tuning);
  [[nodiscard]] int32_t token_tile(int64_t tokens) const { return layer_.token_tile(tokens); }

  // Runs the layer and waits; returns microseconds, with the launches.
  double run(TokenRange range);
  // The results of the last run, or of the last replay of time_runs(): rows [T, H] as fp32, and the
  // experts [T, k + S] that it used.
  [[nodiscard]] std::vector<float> output() const;
  [[nodiscard]] std::vector<int32_t> ids() const;

  // Times runs on these ranges, one after another, until `min_seconds` have passed. A replay is a
  // graph of all ranges on a GPU, which ends with the last one, and one run on the host. Outputs
  // are poisoned before. Runs end with the stage `last`.
  CallTime time_runs(const std::vector<TokenRange>& ranges, double min_seconds,
                     MoeStage last = MoeStage::kCombine);
  [[nodiscard]] int64_t count_launches(TokenRange range, MoeStage last = MoeStage::kCombine);

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
  int64_t tokens_ = 0;  // The tokens of the last run.
};

// One run of a reference layer: the output rows [T, H] as fp32.
std::vector<float> run_reference(const MoeWeights& weights, const MoeConfig& config,
                                 const MoeReferenceOptions& options, const TensorView& rows,
                                 const Routing& routing);

}  // namespace narrowfloat::cli
