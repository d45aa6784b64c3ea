// Calling route() in tests: every implementation runs, into poisoned and guarded outputs, and all
// of them have to agree before the result is looked at.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "narrowfloat/route.h"
#include "support/tensors.h"

namespace narrowfloat::testing {

struct Routed {
  int64_t slots = 0;
  std::vector<int32_t> ids;
  std::vector<uint32_t> weights;  // Bits, so that NaN and -0 compare.
  std::vector<uint16_t> replay;   // Empty if not asked for; 0xFFFF where untouched.

  [[nodiscard]] std::vector<int32_t> ids_of(int64_t token) const;
  [[nodiscard]] std::vector<float> weights_of(int64_t token) const;
  [[nodiscard]] std::vector<uint32_t> weight_bits_of(int64_t token) const;
  bool operator==(const Routed&) const = default;
};

// The results of one token are written down in tests with these types.
using Ids = std::vector<int32_t>;
using Bits = std::vector<uint32_t>;

inline RoutingConfig config_of(RoutingMethod method, int64_t experts, int32_t top_k) {
  return {.method = method, .experts = static_cast<int32_t>(experts), .top_k = top_k};
}
inline RoutingConfig grouped(int64_t experts, int32_t top_k, int32_t n_group, int32_t topk_group) {
  RoutingConfig config = config_of(RoutingMethod::kDeepSeekV3, experts, top_k);
  config.n_group = n_group;
  config.topk_group = topk_group;
  return config;
}

// replay_rows: rows of the replay buffer, none without.
Routed route_everywhere(const Routing& routing, const RoutingConfig& config,
                        std::optional<int64_t> replay_rows = {});

// Logits given row by row, and a bias that is absent if empty.
using Rows = std::vector<std::vector<float>>;
Matrix logits_of(DType dtype, const Rows& rows, int64_t gap = 0);
Routed route_rows(const Rows& logits, const RoutingConfig& config,
                  const std::vector<float>& bias = {});
// The same for one token.
Routed route_row(const std::vector<float>& logits, const RoutingConfig& config,
                 const std::vector<float>& bias = {});

// Precomputed values of [T, k].
TensorView matrix_view(const Vector& values, DType dtype, int64_t top_k);

}  // namespace narrowfloat::testing
