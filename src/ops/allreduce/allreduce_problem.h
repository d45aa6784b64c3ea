// An all-reduce as data: what is computed and on what kind of workspace. Equal on all ranks, so
// that all ranks select the same implementation.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "comm/allreduce_args.h"
#include "comm/launch_shape.h"
#include "narrowfloat/allreduce.h"
#include "runtime/support.h"

namespace narrowfloat {

class NcclCommunicator;
class NcclWatchdog;

struct AllReduceCall {
  AllReduceProblem problem;
  int ranks = 1;
  Device device;
  DType workspace_element = DType::kBF16;
  bool has_peer_memory = true;
  AllReduceCapacities capacities;
  int64_t nccl_bytes = 0;  // 0: no NCCL.
  LaunchLimits limits;

  // Bytes of one rank's message.
  [[nodiscard]] int64_t message_bytes() const {
    return problem.tokens * problem.hidden * (bits(problem.element) / 8);
  }
};
std::string to_string(const AllReduceCall& call);

// The engines of a rank beside its peer memory.
struct AllReduceEngines {
  NcclCommunicator* nccl = nullptr;
  const NcclWatchdog* nccl_watchdog = nullptr;
  uint8_t* nccl_scratch = nullptr;  // Two areas of nccl_scratch_bytes().
};

struct AllReduceImpl {
  std::string_view name;
  AllReduceAlgorithm algorithm;
  Support (*supports)(const AllReduceCall& call);
  void (*run)(const AllReduceCall& call, const RankArgs& args, const AllReduceEngines& engines,
              AllReduceTrigger trigger, Stream stream);
  // All virtual ranks in one launch; null where there is no such form.
  void (*run_virtual)(const AllReduceCall& call, std::span<const RankArgs> args, Stream stream);
};

// Ordered, fastest first, the oracle last. kAuto takes the first that supports a call; a named
// algorithm takes the first of that algorithm.
std::span<const AllReduceImpl> allreduce_impls();
extern const AllReduceImpl kAllReduceSm90OneShot;  // Only in builds with CUDA.
extern const AllReduceImpl kAllReduceSm90TwoShot;
extern const AllReduceImpl kAllReduceNcclExact;
extern const AllReduceImpl kAllReduceNccl;
extern const AllReduceImpl kAllReduceCpuOneShot;
extern const AllReduceImpl kAllReduceCpuTwoShot;
extern const AllReduceImpl kAllReduceCpuReference;

// Facts of a pattern.
AllReduceSource source_of(AllReducePattern pattern);
bool has_norm(AllReducePattern pattern);  // All but kAllReduce.

// Conditions that several implementations share. The first: the call asks for `algorithm`, or for
// any.
Support algorithm_condition(const AllReduceCall& call, AllReduceAlgorithm algorithm);
Support oneshot_condition(const AllReduceCall& call);
Support twoshot_condition(const AllReduceCall& call);

}  // namespace narrowfloat
