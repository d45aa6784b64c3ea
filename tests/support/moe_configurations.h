// The configurations of moe spec 13.1 as data: experts, groups, shards and activations of real
// models. Their own widths are large; make_case() takes narrower ones where it is not asked for
// them.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "support/moe_case.h"

namespace narrowfloat::testing {

struct MoeShard {
  int32_t offset;
  int32_t count;
};

struct MoeConfiguration {
  const char* name;
  MoeShape shape;
  RoutingMethod method = RoutingMethod::kRenormalize;
  int32_t n_group = 1;
  int32_t topk_group = 1;
  ActivationKind activation = ActivationKind::kSwiglu;
  bool weight_on_input = false;
  bool has_odd_extents = false;  // Those of odd_extents() in place of the shape's.
  bool in_every_mode = false;    // Else in the six of configured_modes().
  bool at_many_counts = false;   // Run with many numbers of tokens.
  std::vector<MoeShard> shards;
};
std::span<const MoeConfiguration> moe_configurations();

// The modes that every configuration runs in (moe spec 13.1).
std::span<const MoeMode> configured_modes();

// H and I that are no multiples of 128, or of 256 where the mode wants 128.
MoeShape odd_extents(MoeMode mode, MoeShape shape);

// 128 columns everywhere but in odd extents, or, with `is_wide`, the configuration's own.
std::unique_ptr<MoeCase> make_case(const MoeConfiguration& configuration, MoeMode mode,
                                   int64_t tokens, bool is_wide = false);

// Index into moe_configurations(), mode.
using ConfiguredMode = std::tuple<size_t, MoeMode>;
std::string configured_mode_name(const ::testing::TestParamInfo<ConfiguredMode>& param);

}  // namespace narrowfloat::testing
