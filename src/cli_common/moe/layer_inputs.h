// Inputs of the runs of a made-up layer, rows and routing, and the check of their outputs: a sample
// of a run is compared with an fp64 oracle on the same weights and inputs.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cli_common/host_memory.h"
#include "cli_common/moe/figures.h"
#include "narrowfloat/moe.h"
#include "narrowfloat/safetensors.h"

namespace narrowfloat::cli {

// Tokens go where random logits and the layer's own router send them, or where a file says.
class BenchRouting {
 public:
  // Routes at least `tokens` tokens. kind: "uniform", "zipf", or a safetensors file with a tensor
  // *topk_ids (I32 [T, k]) or *router_logits ([T, E]), of which no more rows than runs need are
  // read. Throws kCorruptData for a file without such a tensor, or with one of another shape;
  // kInvalidArgument where it has too few rows, or experts that the layer has not: `shape_experts`
  // is what the layer has before memory limits it.
  BenchRouting(const std::string& kind, const RoutingConfig& config, int64_t tokens,
               int32_t shape_experts);

  [[nodiscard]] int64_t tokens() const;
  [[nodiscard]] bool has_ids() const { return !ids_.empty(); }
  // The routing of tokens [begin, begin + count).
  [[nodiscard]] Routing range(int64_t begin, int64_t count) const;
  // The routing of these tokens only; `copy` holds what the result views.
  [[nodiscard]] Routing of(std::span<const int64_t> tokens, BenchRouting& copy) const;

 private:
  void read_file(const std::string& path, int64_t tokens, int32_t shape_experts);
  void read_ids(const SafetensorsReader& file, const TensorInfo& tensor, int64_t tokens);
  // Refuses a file that routes to more experts than the layer has.
  void require_experts(const std::string& path, int64_t experts, int32_t shape_experts) const;

  RoutingConfig config_;
  std::vector<float> logits_;  // Either logits
  std::vector<int32_t> ids_;   // or ids.
};

// Throws what the constructor would; random routing always fits.
void check_routing(const std::string& kind, const RoutingConfig& config, int64_t tokens,
                   int32_t shape_experts);

// A layer with made-up weights, and where the tokens of its runs go.
struct BenchLayer {
  MoeConfig config;
  bool has_bias = false;
  int32_t shape_experts = 0;  // The experts of the shape, before memory limits them.
  std::string routing = "uniform";
};

// Tokens [begin, begin + count).
struct TokenRange {
  int64_t begin = 0;
  int64_t count = 0;
};

// The rows and the routing of all runs of a layer.
struct BenchInputs {
  const BenchLayer& layer;
  BenchRouting routing;
  std::vector<uint16_t> rows;  // bf16, as many as there are tokens in `routing`.

  [[nodiscard]] TensorView rows_of(TokenRange range) const;
  // Runs on so many tokens take these ranges in turn, so that few tokens do not find their experts
  // in a cache: up to 32.
  [[nodiscard]] std::vector<TokenRange> ranges(int64_t tokens) const;
  // The load of the experts in a run on these tokens.
  [[nodiscard]] LoadSummary load_of(TokenRange range) const;
};
// Inputs for runs of up to so many tokens; they view `layer`.
BenchInputs bench_inputs(const BenchLayer& layer, int64_t max_tokens);

// kNotChecked: no run had a slot of this rank's experts.
enum class Verdict { kCorrect, kWrong, kNotChecked };

// The part of a run that is kept for its check.
struct RunSample {
  std::vector<int64_t> tokens;  // Tokens with local slots.
  std::vector<float> output;    // The output rows of those tokens.
  bool has_zeros = true;        // The output of a token of that run without local slots is zero.
};
// `ids` are those of the run, [T, k]; it began at token `begin`.
RunSample sample_run(const MoeConfig& config, const std::vector<float>& output,
                     std::span<const int32_t> ids, int64_t begin);

struct CheckedRun {
  int64_t tokens = 0;
  Distance error;
  // Correct: within the tolerance of the mode, and a token without local slots is all zeros.
  Verdict verdict = Verdict::kNotChecked;
};
CheckedRun check_run(const BenchInputs& inputs, const RunSample& sample);

}  // namespace narrowfloat::cli
