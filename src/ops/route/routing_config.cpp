// Names of the routing methods, and the limits of a routing (moe spec 1.8, 4.3). A value that a
// method would ignore is an error.
#include <array>
#include <cmath>

#include "base/name_table.h"
#include "base/throw_error.h"
#include "narrowfloat/route.h"
#include "ops/route/route_problem.h"

namespace narrowfloat {
namespace {

constexpr auto kInfos = [] {
  std::array<RoutingMethodInfo, kRoutingMethods.size()> infos{};
  for (size_t i = 0; i < infos.size(); ++i) {
    const RoutingMethodRecord& record = kRoutingMethods[i];
    infos[i] = {record.id, record.name, record.description};
  }
  return infos;
}();

void check_counts(const RoutingConfig& config) {
  if (config.experts < 1 || config.experts > kMaxExperts) {
    throw_invalid("config.experts: expected 1 to {}, got {}", kMaxExperts, config.experts);
  }
  if (config.top_k < 1 || config.top_k > config.experts) {
    throw_invalid("config.top_k: expected 1 to the number of experts, {}, got {}", config.experts,
                  config.top_k);
  }
  const int32_t room = kMaxExperts - config.experts;
  if (config.shared_experts < 0 || config.shared_experts > room) {
    throw_invalid("config.shared_experts: expected 0 to {} with {} experts ({} in all), got {}",
                  room, config.experts, kMaxExperts, config.shared_experts);
  }
}

void check_groups(const RoutingConfig& config) {
  const int64_t experts = config.experts;
  const int64_t groups = config.n_group;
  if (experts % groups != 0 || experts / groups < 2) {
    throw_invalid(
        "config.n_group: expected a divisor of the {} experts with at least 2 experts a group, "
        "got {}",
        experts, groups);
  }
  if (config.topk_group < 1 || config.topk_group > groups) {
    throw_invalid("config.topk_group: expected 1 to n_group = {}, got {}", groups,
                  config.topk_group);
  }
  const int64_t kept = config.topk_group * (experts / groups);
  if (config.top_k > kept) {
    throw_invalid(
        "config.top_k: expected at most {}, the experts of {} groups of {}, got {}; raise "
        "topk_group",
        kept, config.topk_group, experts / groups, config.top_k);
  }
}

void check_group_counts(const RoutingConfig& config, const RoutingMethodRecord& method) {
  const auto require_plain = [&](std::string_view field, int32_t value) {
    if (value == 0 || value == 1) return;
    if (value < 0) throw_invalid("config.{}: expected 0 or more, got {}", field, value);
    if (method.spec.grouped) return;
    throw_invalid("config.{}: method {} has no groups; expected 0 or 1, got {}", field, method.name,
                  value);
  };
  require_plain("n_group", config.n_group);
  require_plain("topk_group", config.topk_group);
  if (config.n_group > 1) {
    check_groups(config);
  } else if (config.topk_group > 1) {
    throw_invalid("config.topk_group: expected 0 or 1 without groups (n_group = {}), got {}",
                  config.n_group, config.topk_group);
  }
}

}  // namespace

std::span<const RoutingMethodInfo> all_routing_methods() { return kInfos; }

std::string_view name(RoutingMethod method) {
  return record_of(kInfos, method, "routing method").name;
}

RoutingMethod parse_routing_method(std::string_view text) {
  return parse_name(kInfos, text, "routing method");
}

void check_routing_config(const RoutingConfig& config) {
  const RoutingMethodRecord& method = record_of(kRoutingMethods, config.method, "routing method");
  check_counts(config);
  check_group_counts(config, method);
  if (method.spec.single && config.top_k != 1) {
    throw_invalid("config.top_k: method {} selects one expert; expected 1, got {}", method.name,
                  config.top_k);
  }
  if (!std::isfinite(config.routed_scale)) {
    throw_invalid("config.routed_scale: expected a finite number, got {}", config.routed_scale);
  }
  if (!method.spec.scaled && config.routed_scale != 1.0F) {
    throw_invalid("config.routed_scale: method {} has no scale; expected 1, got {}", method.name,
                  config.routed_scale);
  }
  if (!method.spec.norm_optional && !config.norm_topk) {
    throw_invalid("config.norm_topk: method {} has no such choice; expected true, got false",
                  method.name);
  }
}

}  // namespace narrowfloat
