// Where the tokens of `narrowfloat moe bench` go: random logits through the layer's own router, or
// the routing of a file.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "narrowfloat/moe.h"

namespace narrowfloat::cli {

class BenchRouting {
 public:
  // Of at least `tokens` tokens. kind: "uniform", "zipf", or a safetensors file with a tensor
  // *topk_ids (I32 [T, k]) or *router_logits ([T, E]). Throws kCorruptData for a file without, or
  // of another shape.
  BenchRouting(const std::string& kind, const RoutingConfig& config, int64_t tokens);

  [[nodiscard]] int64_t tokens() const;
  // Of tokens [begin, begin + count).
  [[nodiscard]] Routing range(int64_t begin, int64_t count) const;
  // Of these tokens only; `copy` holds what the result views.
  [[nodiscard]] Routing of(std::span<const int64_t> tokens, BenchRouting& copy) const;

 private:
  void read_file(const std::string& path);

  RoutingConfig config_;
  std::vector<float> logits_;  // Or
  std::vector<int32_t> ids_;
};

}  // namespace narrowfloat::cli
