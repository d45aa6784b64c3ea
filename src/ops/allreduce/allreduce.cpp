// The public all-reduce: checks, agrees, selects an implementation, runs it.
#include "narrowfloat/allreduce.h"

#include <array>
#include <optional>
#include <thread>

#include "base/throw_error.h"
#include "ops/allreduce/allreduce_checks.h"
#include "ops/allreduce/workspace.h"
#include "runtime/dispatch.h"

namespace narrowfloat {

std::span<const AllReduceImpl> allreduce_impls() {
  static const std::array kImpls {
#if defined(NARROWFLOAT_CUDA)
    kAllReduceSm90OneShot, kAllReduceSm90TwoShot, kAllReduceNcclExact, kAllReduceNccl,
#endif
        kAllReduceCpuOneShot, kAllReduceCpuTwoShot, kAllReduceCpuReference
  };
  return kImpls;
}

namespace {

using Impl = AllReduceWorkspace::Impl;

// The values that ranks must share beside the problem.
std::string scalars_of(const AllReduceArgs& args) {
  return fmt::format(", eps {}, weight_bias {}, routed_scaling {}", args.eps, args.weight_bias,
                     args.moe.routed_scaling);
}

struct CheckedCall {
  AllReduceCall call;
  RankArgs args;
};

CheckedCall check_call(const Impl& workspace, const AllReduceProblem& problem,
                       const AllReduceArgs& args) {
  workspace.throw_if_failed();
  CheckedCall checked{workspace.call_of(problem),
                      lower_allreduce(problem, args, workspace.options().device)};
  const bool is_32_bit = problem.element == DType::kF32;
  if (is_32_bit != (workspace.options().element == DType::kF32)) {
    throw_invalid(
        "element: this workspace was created for {} elements, got {}; create one for each",
        is_32_bit ? "16-bit" : "32-bit", name(problem.element));
  }
  checked.args.memory = workspace.view();
  checked.args.accumulation = problem.accumulation;
  return checked;
}

// Checks the call, with the agreement of all ranks where it is due.
CheckedCall check_and_agree(Impl& workspace, const AllReduceProblem& problem,
                            const AllReduceArgs& args) {
  if (!workspace.must_agree()) return check_call(workspace, problem, args);
  std::optional<CheckedCall> checked;
  std::optional<Error> error;
  try {
    checked = check_call(workspace, problem, args);
  } catch (const Error& failure) {
    error = failure;
  }
  const AllReduceCall call = checked ? checked->call : workspace.call_of(problem);
  workspace.agree_on(call, scalars_of(args), error ? &*error : nullptr);
  return *checked;
}

}  // namespace

AllReduceAlgorithm allreduce(AllReduceWorkspace& workspace, const AllReduceProblem& problem,
                             const AllReduceArgs& args, Stream stream) {
  Impl& impl = workspace.impl();
  const CheckedCall checked = check_and_agree(impl, problem, args);
  const AllReduceImpl& selected = select("allreduce", allreduce_impls(), checked.call);
  if (problem.tokens == 0) return selected.algorithm;
  selected.run(checked.call, checked.args, impl.engines(), args.trigger, stream);
  // On the CPU the call is over.
  if (workspace.device().type == DeviceType::kCpu) impl.throw_if_failed();
  return selected.algorithm;
}

AllReduceAlgorithm allreduce_virtual_ranks(std::span<AllReduceWorkspace> workspaces,
                                           const AllReduceProblem& problem,
                                           std::span<const AllReduceArgs> args, Stream stream) {
  const size_t ranks = workspaces.size();
  if (ranks == 0) throw_invalid("workspaces: expected those of create_local(), got none");
  if (args.size() != ranks) {
    throw_invalid("args: expected one for each of the {} workspaces, got {}", ranks, args.size());
  }
  std::vector<RankArgs> checked;
  AllReduceCall call;
  for (size_t rank = 0; rank < ranks; ++rank) {
    const Impl& impl = workspaces[rank].impl();
    const bool is_local = impl.bootstrap() == nullptr &&
                          static_cast<size_t>(impl.ranks()) == ranks &&
                          static_cast<size_t>(impl.rank()) == rank;
    if (!is_local) {
      throw_invalid("workspaces: expected all ranks of one create_local() in their order");
    }
    const CheckedCall one = check_call(impl, problem, args[rank]);
    call = one.call;
    checked.push_back(one.args);
  }
  const AllReduceImpl& selected = select("allreduce", allreduce_impls(), call);
  if (problem.tokens == 0) return selected.algorithm;
  if (selected.run_virtual != nullptr) {
    selected.run_virtual(call, checked, stream);
    return selected.algorithm;
  }
  std::vector<std::jthread> threads;
  for (size_t rank = 1; rank < ranks; ++rank) {
    threads.emplace_back(
        [&, rank] { selected.run(call, checked[rank], {}, AllReduceTrigger::kAtEnd, stream); });
  }
  selected.run(call, checked[0], {}, AllReduceTrigger::kAtEnd, stream);
  threads.clear();
  for (const AllReduceWorkspace& workspace : workspaces) workspace.check_error();
  return selected.algorithm;
}

Explanation explain_allreduce(const AllReduceExplainRequest& request) {
  check_allreduce_problem(request.problem);
  AllReduceCapacities capacities = request.capacities;
  const AllReduceCapacities defaults =
      default_allreduce_capacities(std::min(request.ranks, kMaxRanks));
  if (capacities.oneshot_bytes == 0) capacities.oneshot_bytes = defaults.oneshot_bytes;
  if (capacities.twoshot_bytes == 0) capacities.twoshot_bytes = defaults.twoshot_bytes;
  const int64_t nccl_bytes =
      request.nccl_bytes == 0 ? capacities.twoshot_bytes : request.nccl_bytes;
  const bool is_cuda = request.device.type == DeviceType::kCuda;
  const AllReduceCall call{.problem = request.problem,
                           .ranks = request.ranks,
                           .device = request.device,
                           .workspace_element = request.problem.element,
                           .has_peer_memory = request.has_peer_memory,
                           .capacities = capacities,
                           .nccl_bytes = is_cuda && request.has_nccl ? nccl_bytes : 0,
                           .limits = {}};
  return explain_candidates("allreduce", allreduce_impls(), call);
}

}  // namespace narrowfloat
