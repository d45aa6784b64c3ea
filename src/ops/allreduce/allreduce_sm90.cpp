// sm90_oneshot and sm90_twoshot: the protocols of src/comm over peer memory, for one rank or for
// all virtual ranks of a GPU.
#include "ops/allreduce/allreduce_sm90.h"

#include <algorithm>

#include "runtime/cuda/cuda_devices.h"

namespace narrowfloat {
namespace {

AllReduceLaunchPlan plan_of(const AllReduceCall& call, AllReduceProtocol protocol,
                            AllReduceTrigger trigger, bool is_virtual) {
  LaunchLimits limits = call.limits;
  // Kernels of fp32 elements have more registers a thread, and half as many threads.
  if (call.problem.element == DType::kF32) limits.max_warps = std::min(limits.max_warps, 8);
  const bool runs_kernel_of_eight = is_virtual && call.problem.element != DType::kBF16;
  const ShapeRequest request{.tokens = call.problem.tokens,
                             .hidden = call.problem.hidden,
                             .ranks = runs_kernel_of_eight ? kMaxRanks : call.ranks,
                             .element_bytes = bits(call.problem.element) / 8};
  return {.protocol = protocol,
          .shape = allreduce_shape(request, limits),
          .device = call.device.index,
          .triggers_after_push = trigger == AllReduceTrigger::kAfterPush};
}

Support runs_here(const AllReduceCall& call, AllReduceAlgorithm algorithm) {
  const Support support = epilogue_condition(call);
  return support.ok() ? algorithm_condition(call, algorithm) : support;
}

Support supports_oneshot(const AllReduceCall& call) {
  const Support support = runs_here(call, AllReduceAlgorithm::kOneShot);
  return support.ok() ? oneshot_condition(call) : support;
}

Support supports_twoshot(const AllReduceCall& call) {
  const Support support = runs_here(call, AllReduceAlgorithm::kTwoShot);
  return support.ok() ? twoshot_condition(call) : support;
}

void run_protocol(const AllReduceCall& call, AllReduceProtocol protocol,
                  std::span<const RankArgs> args, AllReduceTrigger trigger, Stream stream) {
  if (call.ranks == 1) protocol = AllReduceProtocol::kSingleRank;
  launch_allreduce(call.problem.element, plan_of(call, protocol, trigger, args.size() > 1), args,
                   stream);
}

void run_oneshot(const AllReduceCall& call, const RankArgs& args,
                 const AllReduceEngines& /*engines*/, AllReduceTrigger trigger, Stream stream) {
  run_protocol(call, AllReduceProtocol::kOneShot, std::span(&args, 1), trigger, stream);
}

void run_twoshot(const AllReduceCall& call, const RankArgs& args,
                 const AllReduceEngines& /*engines*/, AllReduceTrigger trigger, Stream stream) {
  run_protocol(call, AllReduceProtocol::kTwoShot, std::span(&args, 1), trigger, stream);
}

void run_virtual_oneshot(const AllReduceCall& call, std::span<const RankArgs> args, Stream stream) {
  run_protocol(call, AllReduceProtocol::kOneShot, args, AllReduceTrigger::kAtEnd, stream);
}

void run_virtual_twoshot(const AllReduceCall& call, std::span<const RankArgs> args, Stream stream) {
  run_protocol(call, AllReduceProtocol::kTwoShot, args, AllReduceTrigger::kAtEnd, stream);
}

}  // namespace

void launch_allreduce(DType element, const AllReduceLaunchPlan& plan,
                      std::span<const RankArgs> args, Stream stream) {
  if (element == DType::kBF16) return launch_allreduce_bf16(plan, args, stream);
  if (element == DType::kF16) return launch_allreduce_f16(plan, args, stream);
  launch_allreduce_f32(plan, args, stream);
}

Support epilogue_condition(const AllReduceCall& call) {
  Support support = runs_own_code(call.device);
  if (!support.ok()) return support;
  constexpr int64_t kMostHidden = 65536;
  if (call.problem.hidden > kMostHidden) return Support::no("takes up to 65536 columns");
  return Support::yes();
}

void launch_epilogue(const AllReduceCall& call, const RankArgs& args, AllReduceTrigger trigger,
                     Stream stream) {
  AllReduceCall alone = call;
  alone.ranks = 1;
  run_protocol(alone, AllReduceProtocol::kSingleRank, std::span(&args, 1), trigger, stream);
}

const AllReduceImpl kAllReduceSm90OneShot{"sm90_oneshot", AllReduceAlgorithm::kOneShot,
                                          supports_oneshot, run_oneshot, run_virtual_oneshot};
const AllReduceImpl kAllReduceSm90TwoShot{"sm90_twoshot", AllReduceAlgorithm::kTwoShot,
                                          supports_twoshot, run_twoshot, run_virtual_twoshot};

}  // namespace narrowfloat
