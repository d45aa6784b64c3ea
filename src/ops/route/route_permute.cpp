// The entry point of the operation: selects an implementation, if there is one, and runs it.
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
  if (problem.quantized == RowFormat::kBf16) return text;
  return text + fmt::format("; {} columns -> {}", problem.cols, name(problem.quantized));
}

RoutePermuteProblem route_permute_problem(const RoutePermuteArgs& args) {
  RoutePermuteProblem problem{.route = route_problem(args.routing, args.config)};
  problem.layout = permutation_layout(problem.route.tokens, problem.route.slots(),
                                      args.local_experts, args.permutation.token_tile);
  if (!args.input.rows.is_absent()) {
    problem.quantized = args.input.format;
    problem.cols = args.input.rows.shape[1];
  }
  return problem;
}

bool joins_routing(const RoutePermuteProblem& problem) {
  if (problem.route.device.type == DeviceType::kCpu) return false;
  if (!forced_implementation("route_permute").empty()) return true;
  return find_implementation("route_permute", route_permute_impls(), problem) != nullptr;
}

void route_and_permute(const RoutePermuteArgs& args, Stream stream) {
  const RouteCall call = route_call(args.routing, args.config, args.outputs);
  const RoutePermuteProblem problem = route_permute_problem(args);
  select("route_permute", route_permute_impls(), problem).run(problem, call.args, args, stream);
}

}  // namespace narrowfloat
