// Selection of an implementation: ordered lists, fastest first, the oracle last.
//
// An implementation is a record {name, supports, run}. The first one that supports a problem runs;
// if none does, the error lists each candidate with its reason. The environment variable
// NARROWFLOAT_FORCE=op:implementation[,op:implementation...] pins one; if that one refuses the
// problem, it is an error, never a fallback.
#pragma once

#include <array>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "narrowfloat/runtime.h"
#include "runtime/support.h"

namespace narrowfloat {

// Every operation with a list of implementations.
inline constexpr std::array<std::string_view, 20> kOperations = {"quantize",
                                                                 "dequantize",
                                                                 "relayout",
                                                                 "amax",
                                                                 "route",
                                                                 "permute",
                                                                 "quantize_activations",
                                                                 "activation",
                                                                 "grouped_gemm",
                                                                 "combine",
                                                                 "shuffle",
                                                                 "pack_bits",
                                                                 "group_quantize",
                                                                 "kv_quantize",
                                                                 "kv_dequantize",
                                                                 "kv_reorder",
                                                                 "route_permute",
                                                                 "invert_scales",
                                                                 "allreduce",
                                                                 "expert_parallel"};

// The implementation that NARROWFLOAT_FORCE pins for `op`; empty if none. Throws kInvalidArgument
// for a malformed value or an operation that does not exist.
std::string forced_implementation(std::string_view op);

namespace dispatch_detail {
[[noreturn]] void throw_none_fits(const Explanation& explanation);
void check_forced_name(const Explanation& explanation, std::string_view forced);
}  // namespace dispatch_detail

// Asks every candidate. Impl has `name` and `supports(problem)`.
template <typename Impl, typename Problem>
Explanation explain_candidates(std::string_view op, std::span<const Impl> impls,
                               const Problem& problem) {
  const std::string forced = forced_implementation(op);
  Explanation explanation{.op = std::string(op), .problem = to_string(problem)};
  for (const Impl& impl : impls) {
    Candidate candidate{.name = std::string(impl.name)};
    const Support support = impl.supports(problem);
    candidate.supported = support.ok();
    if (!support.ok()) {
      candidate.reason = support.reason();
    } else if (!forced.empty() && impl.name != forced) {
      candidate.reason = "passed over: NARROWFLOAT_FORCE pins " + forced;
    } else if (explanation.chosen.empty()) {
      explanation.chosen = impl.name;
    } else {
      candidate.reason = "passed over: " + explanation.chosen + " comes first";
    }
    explanation.candidates.push_back(std::move(candidate));
  }
  dispatch_detail::check_forced_name(explanation, forced);
  return explanation;
}

// Returns the implementation that runs the problem; null if none fits.
template <typename Impl, typename Problem>
const Impl* find_implementation(std::string_view op, std::span<const Impl> impls,
                                const Problem& problem) {
  const std::string forced = forced_implementation(op);
  for (const Impl& impl : impls) {
    if (!forced.empty() && impl.name != forced) continue;
    if (impl.supports(problem).ok()) return &impl;
  }
  return nullptr;
}

// The implementation that runs. Throws kUnsupported with every candidate's reason.
template <typename Impl, typename Problem>
const Impl& select(std::string_view op, std::span<const Impl> impls, const Problem& problem) {
  if (const Impl* impl = find_implementation(op, impls, problem)) return *impl;
  dispatch_detail::throw_none_fits(explain_candidates(op, impls, problem));
}

}  // namespace narrowfloat
