// The rule of launch shapes. A CTA is whole warps, a row of any length is
// covered with predicated ends, a cluster is a power of two that divides the grid, and all CTAs are
// resident at once.
#include "comm/launch_shape.h"

#include <algorithm>

#include "base/int_math.h"
#include "comm/workspace_layout.h"

namespace narrowfloat {
namespace {

// An SM has four parts, each with registers and places for warps of its own.
constexpr int64_t kPartsOfSm = 4;
constexpr int64_t kRegistersOfPart = 16384;
constexpr int64_t kWarpsOfPart = 16;
constexpr int64_t kSharedBytesOfSm = 227 * 1024;
constexpr int64_t kWarpLanes = 32;
constexpr int64_t kMaxSteps = 8;

struct CtaShape {
  int64_t warps = 1;
  int64_t steps = 1;
  int64_t ctas_per_sm = 1;
};

int64_t ctas_per_sm(const ShapeRequest& request, int64_t warps, int64_t steps) {
  const int64_t registers = allreduce_registers(request.ranks, request.element_bytes);
  // Registers are given to warps in units of 256, shared memory to CTAs with 1 KB more.
  const int64_t of_warp = round_up(registers * kWarpLanes, int64_t{256});
  const int64_t resident_warps = kPartsOfSm * std::min(kRegistersOfPart / of_warp, kWarpsOfPart);
  const int64_t shared = row_memory_bytes(steps, warps, request.element_bytes) + 1024;
  return std::max<int64_t>(std::min(resident_warps / warps, kSharedBytesOfSm / shared), 1);
}

// SMs that clusters can fill. A cluster lies within a group of SMs (GPC), whose number of SMs is
// even, so up to an eighth of all SMs stays free with larger clusters.
int64_t sms_for(int64_t cluster, const LaunchLimits& limits) {
  return cluster <= 2 ? limits.sms : limits.sms - limits.sms / 8;
}

// Chooses the shape that keeps the most warps of an SM at work. With more tokens than SMs, several
// CTAs share one: some compute while others wait. tokens_per_sm: rounded up.
CtaShape cta_shape(const ShapeRequest& request, int64_t chunks, int64_t tokens_per_sm,
                   int64_t max_warps) {
  CtaShape best;
  double most = 0.0;
  const int64_t least_steps = ceil_div(chunks, max_warps);
  for (int64_t steps = least_steps; steps <= std::max(kMaxSteps, least_steps); ++steps) {
    const int64_t warps = ceil_div(chunks, steps);
    const int64_t ctas = ctas_per_sm(request, warps, steps);
    const double at_work = static_cast<double>(std::min(ctas, tokens_per_sm)) *
                           static_cast<double>(chunks) / static_cast<double>(steps);
    if (at_work <= most) continue;
    most = at_work;
    best = {.warps = warps, .steps = steps, .ctas_per_sm = ctas};
  }
  return best;
}

}  // namespace

AllReduceShape allreduce_shape(const ShapeRequest& request, const LaunchLimits& limits) {
  const int64_t chunks = ceil_div(std::max<int64_t>(request.hidden, 1), kChunkCols);
  const int64_t tokens = std::max<int64_t>(request.tokens, 1);
  int64_t cluster = 1;
  // A cluster that can hold a row at all.
  constexpr int64_t kMostSteps = 4;
  while (cluster < limits.max_cluster && cluster * limits.max_warps * kMostSteps < chunks) {
    cluster *= 2;
  }
  // Few tokens are spread over more SMs, while every CTA keeps four warps' work.
  while (2 * cluster <= limits.max_cluster &&
         tokens * 2 * cluster <= sms_for(2 * cluster, limits) && chunks >= 8 * cluster) {
    cluster *= 2;
  }
  const int64_t tokens_per_sm = ceil_div(tokens * cluster, int64_t{limits.sms});
  const CtaShape cta =
      cta_shape(request, ceil_div(chunks, cluster), tokens_per_sm, limits.max_warps);
  const int64_t sms = std::max(sms_for(cluster, limits), cluster);
  const int64_t resident = std::min<int64_t>(sms * cta.ctas_per_sm, kMostCtas);
  const int64_t most_clusters = std::max<int64_t>(resident / cluster, 1);
  // Every cluster takes as many tokens as the others, but for one.
  const int64_t clusters = ceil_div(tokens, ceil_div(tokens, most_clusters));
  return {.cluster = static_cast<int>(cluster),
          .warps = static_cast<int>(cta.warps),
          .steps = static_cast<int>(cta.steps),
          .clusters = static_cast<int>(clusters)};
}

}  // namespace narrowfloat
