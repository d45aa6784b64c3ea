// A model of the time of an expert-parallel layer on many GPUs, from times that were measured on
// one or two. docs/parallel.md derives its formulas.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli_common/output.h"

namespace narrowfloat::cli {

// The text of src/bench_cli/ep_model.json.
const char* ep_model_inputs();

// The time of one step is latency_us + bytes / gb_per_s, or none without bytes.
struct LinkModel {
  double latency_us = 0;
  double gb_per_s = 0;
};

// A whole layer on one GPU, under uniform routing.
struct MeasuredLayer {
  double tokens = 0;
  double experts_hit = 0;
  double us = 0;
};

struct EpModel {
  std::string model;  // "deepseek-v3"
  std::string mode;   // "nvfp4_bf16"
  int64_t hidden = 0;
  int64_t experts = 0;
  int64_t top_k = 0;
  std::vector<MeasuredLayer> cases;  // Ascending in tokens.
  int64_t ranks_per_host = 0;
  LinkModel host_link;
  LinkModel network;
  LinkModel quantize;  // Rows are quantized before they travel; the bytes are those of bf16.
  double token_sum_gb_per_s = 0;  // Order topk sums the rows of one token at this rate.
};
// Throws kInvalidArgument that lists what there is where the inputs lack the GPU, model or mode. An
// empty mode is the first of the model.
EpModel find_ep_model(const Json& inputs, const std::string& gpu, const std::string& model,
                      const std::string& mode);

struct EpPrediction {
  int64_t local_experts = 0;  // Those of the ranks that have most.
  double experts_hit = 0;
  double ranks_of_token = 0;  // Other ranks that a token is sent to.
  double layer_us = 0;
  double dispatch_us = 0;
  double combine_us = 0;

  [[nodiscard]] double total_us() const { return layer_us + dispatch_us + combine_us; }
};
// The rows that travel: one of a token to each rank that gets it, and back as many, or with order
// topk one for each slot.
struct EpRows {
  double dispatch_bytes = 0;
  double combine_bytes = 0;
  bool is_topk = false;
  bool is_quantized = false;
};
// `tokens` is the number of each rank.
EpPrediction predict(const EpModel& model, int64_t ranks, int64_t tokens, const EpRows& rows);

}  // namespace narrowfloat::cli
