// Precomputed routings, written down slot by slot, and those of moe spec 13.2 by name.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "narrowfloat/route.h"

namespace narrowfloat::testing {

struct GivenRouting {
  std::string name;
  int64_t top_k = 1;
  std::vector<int32_t> ids;    // [tokens, top_k]
  std::vector<float> weights;  // The same.

  [[nodiscard]] int64_t tokens() const { return static_cast<int64_t>(ids.size()) / top_k; }
  // Into this object.
  [[nodiscard]] Routing view() const;
};

// Every token to these experts, in this order; weights of slots are 0.5, 0.75, ...
GivenRouting same_experts(std::string name, int64_t tokens, const std::vector<int32_t>& experts);

// Routings of two slots over 16 experts, of 8 to 80 tokens: one expert, the same experts, an expert
// twice, one token an expert, counts of a tile of 8 and one less and one more of each, Zipf, empty
// slots.
std::vector<GivenRouting> skewed_routings();

}  // namespace narrowfloat::testing
