// See bench_config.h.
#include "cli/moe/bench_config.h"

#include <algorithm>

#include <fmt/format.h>

#include "cli/moe/random_layer.h"
#include "cli/size_text.h"
#include "narrowfloat/error.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat::cli {
namespace {

// Bytes of a run's buffers: sums of the first GEMM, intermediate and slot results of every row.
double buffer_bytes(const MoeConfig& config, int64_t tokens) {
  const auto slots = static_cast<double>(tokens * config.routing.top_k);
  const auto width =
      static_cast<double>(2 * config.inter * 8 + config.inter * 4 + config.hidden * 4);
  return slots * width + static_cast<double>(tokens * config.hidden * 8);
}

// Groups need at least two experts each, and the kept ones k together.
void fit_groups(RoutingConfig& routing) {
  if (routing.n_group <= 1) return;
  const int32_t per_group = routing.experts / routing.n_group;
  const bool fits = routing.experts % routing.n_group == 0 && per_group >= 2 &&
                    per_group * routing.topk_group >= routing.top_k;
  if (!fits) routing.n_group = routing.topk_group = 1;
}

void check_extents(const MoeShape& shape, const MoeModeInfo& mode, const ExpertShard& shard) {
  if (shape.hidden % mode.multiple != 0 || shape.inter % mode.multiple != 0) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("--mode {}: hidden and intermediate size must be multiples of {}, {} "
                            "has {} and {}",
                            mode.name, mode.multiple, shape.name, shape.hidden, shape.inter));
  }
  if (shape.routing.experts % shard.num_ranks != 0) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("--ep {}/{}: the {} experts of {} cannot be shared evenly", shard.rank,
                            shard.num_ranks, shape.routing.experts, shape.name));
  }
}

}  // namespace

std::vector<MoeMode> bench_modes(const MoeShape& shape, std::span<const MoeMode> named, bool is_all,
                                 std::vector<std::string>& notes) {
  if (named.empty() && !is_all) return {shape.mode};
  std::vector<MoeMode> modes;
  for (const MoeModeInfo& info : all_moe_modes()) {
    const bool is_named = std::find(named.begin(), named.end(), info.id) != named.end();
    const bool fits = shape.hidden % info.multiple == 0 && shape.inter % info.multiple == 0;
    if (is_named || (is_all && fits)) {
      modes.push_back(info.id);
    } else if (is_all) {
      notes.push_back(
          fmt::format("{}: left out, hidden and intermediate size must be multiples "
                      "of {}",
                      info.name, info.multiple));
    }
  }
  return modes;
}

uint64_t memory_limit(uint64_t asked_for, const Machine* gpu) {
  // The rest is the system's and ours.
  constexpr double kMemoryShare = 0.6;
  if (asked_for > 0) return asked_for;
  const uint64_t available = gpu == nullptr ? available_memory_bytes() : gpu->facts().memory_bytes;
  return static_cast<uint64_t>(static_cast<double>(available) * kMemoryShare);
}

MoeConfig bench_config(const MoeShape& shape, MoeMode mode, const ExpertShard& shard,
                       int64_t max_tokens, uint64_t max_bytes) {
  check_extents(shape, moe_mode_info(mode), shard);
  MoeConfig config;
  config.hidden = shape.hidden;
  config.inter = shape.inter;
  config.mode = mode;
  config.activation = shape.activation;
  config.gate_order = shape.gate_order;
  config.weight_on_input = shape.weight_on_input;
  config.routing = shape.routing;
  config.local_experts = 1;
  const double for_weights = static_cast<double>(max_bytes) - buffer_bytes(config, max_tokens);
  const double each = 2 * RandomWeights::bytes(config);  // Canonical, and prepared.
  const int32_t wanted = shape.routing.experts / shard.num_ranks;
  const int32_t fewest = (shape.routing.top_k + shard.num_ranks - 1) / shard.num_ranks;
  const auto affordable = static_cast<int64_t>(std::max(for_weights, 0.0) / each);
  if (affordable < fewest) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("--shape {}: even {} experts in mode {} need {}, more than the {} that "
                            "may be used; see --max-memory, --tokens and --ep",
                            shape.name, fewest, name(mode),
                            format_bytes(static_cast<uint64_t>(fewest * each +
                                                               buffer_bytes(config, max_tokens))),
                            format_bytes(max_bytes)));
  }
  config.local_experts = static_cast<int32_t>(std::min<int64_t>(affordable, wanted));
  const int32_t groups = std::max(config.routing.n_group, 1);
  // Whole groups, so that the router stays the model's.
  if (config.local_experts < wanted && config.local_experts * shard.num_ranks > 2 * groups &&
      groups % shard.num_ranks == 0) {
    config.local_experts -= config.local_experts % (groups / shard.num_ranks);
  }
  config.routing.experts = config.local_experts * shard.num_ranks;
  config.expert_offset = config.local_experts * shard.rank;
  fit_groups(config.routing);
  return config;
}

}  // namespace narrowfloat::cli
