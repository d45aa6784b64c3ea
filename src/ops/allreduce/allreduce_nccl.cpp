// nccl_exact and nccl: NCCL moves the data, for every size, topology and number of ranks
// (docs/allreduce.md, Protocols).
//
//   nccl_exact   ranges of leaves to their owners | sum in rank order | all-gather | epilogue
//   nccl         ncclAllReduce                                                     | epilogue
//
// Ranges are of equal size, the last one short, so that gathering them gives the message in order.
// The addends of MoE patterns are computed into scratch memory first.
#include <algorithm>
#include <vector>

#include "base/int_math.h"
#include "ops/allreduce/allreduce_sm90.h"
#include "ops/allreduce/nccl_watchdog.h"
#include "ops/allreduce/workspace.h"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/nccl.h"

namespace narrowfloat {
namespace {

int64_t leaf_bytes(const AllReduceCall& call) {
  return kLeafElements * (bits(call.problem.element) / 8);
}

int64_t num_leaves(const AllReduceCall& call) {
  return call.problem.tokens * call.problem.hidden / kLeafElements;
}

Support common_condition(const AllReduceCall& call) {
  const Support support = epilogue_condition(call);
  if (!support.ok()) return support;
  if (call.ranks == 1) return Support::no("one rank needs no exchange");
  if (call.nccl_bytes == 0) return Support::no("NCCL was not found, or is switched off");
  if (call.message_bytes() > call.nccl_bytes) {
    return Support::no("the message exceeds nccl_bytes");
  }
  return Support::yes();
}

Support supports_exact(const AllReduceCall& call) {
  const Support support = algorithm_condition(call, AllReduceAlgorithm::kNcclExact);
  return support.ok() ? common_condition(call) : support;
}

Support supports_fast(const AllReduceCall& call) {
  const Support support = algorithm_condition(call, AllReduceAlgorithm::kNccl);
  if (!support.ok()) return support;
  if (call.problem.exactness != AllReduceExactness::kFast) {
    return Support::no("its order of summation is NCCL's own: needs exactness kFast");
  }
  return common_condition(call);
}

// The local addends as a tensor: the input itself, or computed into `scratch`.
const void* local_addends(const AllReduceCall& call, const RankArgs& args, void* scratch,
                          Stream stream) {
  if (args.source.kind == AllReduceSource::kInput) return args.source.input;
  RankArgs local = args;
  local.epilogue = {};
  local.epilogue.tokens = args.epilogue.tokens;
  local.epilogue.hidden = args.epilogue.hidden;
  local.epilogue.ar_out = scratch;
  launch_epilogue(call, local, AllReduceTrigger::kAtEnd, stream);
  return scratch;
}

void run_epilogue(const AllReduceCall& call, const RankArgs& args, const AllReduceEngines& engines,
                  const void* sums, AllReduceTrigger trigger, Stream stream) {
  RankArgs rest = args;
  rest.source = {.kind = AllReduceSource::kInput, .input = sums};
  rest.end_of_exchange = engines.nccl_watchdog->end(stream);
  // NCCL's kernels never let the next one start early, and the watchdog's branch ends here, too.
  stream.programmatic_launch = false;
  launch_epilogue(call, rest, trigger, stream);
}

void run_exact(const AllReduceCall& call, const RankArgs& args, const AllReduceEngines& engines,
               AllReduceTrigger trigger, Stream stream) {
  uint8_t* const received = engines.nccl_scratch;
  uint8_t* const sums = received + nccl_scratch_bytes(call.nccl_bytes, call.ranks);
  const int64_t leaves = num_leaves(call);
  const int64_t range = ceil_div(leaves, int64_t{call.ranks});
  const int64_t bytes = leaf_bytes(call);
  const auto leaves_of = [&](int64_t rank) {
    return std::clamp<int64_t>(leaves - rank * range, 0, range);
  };
  const int64_t own_leaves = leaves_of(args.memory.rank);
  std::vector<NcclCommunicator::Part> sends;
  std::vector<NcclCommunicator::Part> receives;
  for (int64_t rank = 0; rank < call.ranks; ++rank) {
    sends.push_back({rank * range * bytes, leaves_of(rank) * bytes});
    receives.push_back({rank * own_leaves * bytes, own_leaves * bytes});
  }
  const void* const addends = local_addends(call, args, sums, stream);
  engines.nccl_watchdog->begin(stream);
  engines.nccl->exchange(addends, sends, received, receives, stream);
  uint8_t* const own = sums + args.memory.rank * range * bytes;
  sum_over_ranks(call.problem.element,
                 {.parts = received,
                  .sum = own,
                  .leaves = own_leaves,
                  .ranks = call.ranks,
                  .accumulation = call.problem.accumulation},
                 call.device, stream);
  engines.nccl->all_gather(own, sums, range * bytes, stream);
  run_epilogue(call, args, engines, sums, trigger, stream);
}

void run_fast(const AllReduceCall& call, const RankArgs& args, const AllReduceEngines& engines,
              AllReduceTrigger trigger, Stream stream) {
  uint8_t* const sums = engines.nccl_scratch;
  const void* const addends = local_addends(call, args, sums, stream);
  engines.nccl_watchdog->begin(stream);
  engines.nccl->all_reduce(addends, sums, call.problem.tokens * call.problem.hidden,
                           call.problem.element, stream);
  run_epilogue(call, args, engines, sums, trigger, stream);
}

}  // namespace

const AllReduceImpl kAllReduceNcclExact{"nccl_exact", AllReduceAlgorithm::kNcclExact,
                                        supports_exact, run_exact, nullptr};
const AllReduceImpl kAllReduceNccl{"nccl", AllReduceAlgorithm::kNccl, supports_fast, run_fast,
                                   nullptr};

}  // namespace narrowfloat
