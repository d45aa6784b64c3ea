// The entry of the operation: choose an implementation, if there is one, and run it.
#include "ops/route/route_permute.h"

#include <fmt/format.h>

#include "runtime/dispatch.h"

namespace narrowfloat {

std::span<const RoutePermuteImpl> route_permute_impls() {
#if defined(NARROWFLOAT_CUDA)
  return {&kRoutePermuteSm90, 1};
#else
  return {};
#endif
}

std::string to_string(const RoutePermuteProblem& problem) {
  std::string text = fmt::format("{}; local experts {}, tile {}", to_string(problem.route),
                                 problem.layout.local_experts, problem.layout.token_tile);
  if (problem.coded == RowFormat::kBf16) return text;
  return text + fmt::format("; {} columns -> {}", problem.cols, name(problem.coded));
}

bool route_and_permute(const RoutePermuteArgs& args, Stream stream) {
  // Asked before anything is checked: the operations it stands for do that themselves.
  if (args.permutation.slot_to_row.device.type == DeviceType::kCpu) return false;
  const RouteCall call = route_call(args.routing, args.config, args.outputs);
  RoutePermuteProblem problem{.route = call.problem};
  problem.layout = permutation_layout(call.problem.tokens, call.problem.slots(), args.local_experts,
                                      args.permutation.token_tile);
  if (!args.input.rows.is_absent()) {
    problem.coded = args.input.format;
    problem.cols = args.input.rows.shape[1];
  }
  const std::string forced = forced_implementation("route_permute");
  if (!forced.empty()) {
    select("route_permute", route_permute_impls(), problem).run(problem, call.args, args, stream);
    return true;
  }
  for (const RoutePermuteImpl& impl : route_permute_impls()) {
    if (!impl.supports(problem).ok()) continue;
    impl.run(problem, call.args, args, stream);
    return true;
  }
  return false;
}

}  // namespace narrowfloat
