// Launches of the all-reduce kernels, apart from their compilation: a translation unit for each
// element type. It needs no CUDA header.
#pragma once

#include <span>

#include "ops/allreduce/allreduce_problem.h"

namespace narrowfloat {

enum class AllReduceProtocol : int { kSingleRank = 0, kOneShot = 1, kTwoShot = 2 };

struct AllReduceLaunchPlan {
  AllReduceProtocol protocol = AllReduceProtocol::kOneShot;
  AllReduceShape shape;
  int device = 0;
  bool triggers_after_push = false;
};

// args: one rank, or all virtual ranks of the device.
void launch_allreduce_bf16(const AllReduceLaunchPlan& plan, std::span<const RankArgs> args,
                           Stream stream);
void launch_allreduce_f16(const AllReduceLaunchPlan& plan, std::span<const RankArgs> args,
                          Stream stream);
void launch_allreduce_f32(const AllReduceLaunchPlan& plan, std::span<const RankArgs> args,
                          Stream stream);

void launch_allreduce(DType element, const AllReduceLaunchPlan& plan,
                      std::span<const RankArgs> args, Stream stream);

// The condition of launch_epilogue().
Support epilogue_condition(const AllReduceCall& call);
// The local addends and what follows the sum, without an exchange: args.source is the sum.
void launch_epilogue(const AllReduceCall& call, const RankArgs& args, AllReduceTrigger trigger,
                     Stream stream);

// Sums `ranks` parts of `leaves` leaves, one after another in memory, in their order.
struct RankSum {
  const void* parts = nullptr;
  void* sum = nullptr;
  int64_t leaves = 0;
  int ranks = 1;
  AllReduceAccumulation accumulation = AllReduceAccumulation::kFp32;
};
void sum_over_ranks(DType element, const RankSum& sum, Device device, Stream stream);

// Fills device memory with a word, in stream order: sentinels are no multiple of a byte.
void fill_words(void* memory, int64_t words, uint32_t value, Device device, Stream stream);

}  // namespace narrowfloat
