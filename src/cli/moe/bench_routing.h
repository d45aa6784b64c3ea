// Where the tokens of `narrowfloat moe bench` go: random logits through the layer's own router, or
// the routing of a file.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "narrowfloat/moe.h"
#include "narrowfloat/safetensors.h"

namespace narrowfloat::cli {

class BenchRouting {
 public:
  // Of at least `tokens` tokens. kind: "uniform", "zipf", or a safetensors file with a tensor
  // *topk_ids (I32 [T, k]) or *router_logits ([T, E]), of which no more rows than runs need are
  // read. Throws kCorruptData for a file without, or of another shape; kInvalidArgument where it
  // has too few rows, or experts that the layer has not: `shape_experts` is what the layer has
  // before memory limits it.
  BenchRouting(const std::string& kind, const RoutingConfig& config, int64_t tokens,
               int32_t shape_experts);

  [[nodiscard]] int64_t tokens() const;
  [[nodiscard]] bool has_ids() const { return !ids_.empty(); }
  // Of tokens [begin, begin + count).
  [[nodiscard]] Routing range(int64_t begin, int64_t count) const;
  // Of these tokens only; `copy` holds what the result views.
  [[nodiscard]] Routing of(std::span<const int64_t> tokens, BenchRouting& copy) const;

 private:
  void read_file(const std::string& path, int64_t tokens, int32_t shape_experts);
  void read_ids(const SafetensorsReader& file, const TensorInfo& tensor, int64_t tokens);
  // Where the file routes to more experts than the layer has.
  void require_experts(const std::string& path, int64_t experts, int32_t shape_experts) const;

  RoutingConfig config_;
  std::vector<float> logits_;  // Or
  std::vector<int32_t> ids_;
};

// Throws what the constructor would; random routing always fits.
void check_routing(const std::string& kind, const RoutingConfig& config, int64_t tokens,
                   int32_t shape_experts);

}  // namespace narrowfloat::cli
