// Ranks of an all-reduce: the tensors of one rank in guarded memory, random inputs, and, for the
// CPU without a workspace object, peer memory that threads and forked processes share.
#pragma once

#include <array>
#include <functional>
#include <string>
#include <vector>

#include "ops/allreduce/allreduce_problem.h"
#include "support/allreduce_golden.h"
#include "support/fills.h"
#include "support/guarded_buffer.h"

namespace narrowfloat::testing {

inline const std::array kCpuImpls{&kAllReduceCpuOneShot, &kAllReduceCpuTwoShot,
                                  &kAllReduceCpuReference};

// The regions of all ranks, with canaries after each, in memory that children of fork() share. The
// two-shot has the smallest chunks there are, so that small messages take several.
class RankGroup {
 public:
  RankGroup(int ranks, const AllReduceCapacities& capacities, DType element,
            std::chrono::milliseconds deadline = std::chrono::seconds(60));
  ~RankGroup();
  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;

  [[nodiscard]] int ranks() const { return ranks_; }
  [[nodiscard]] const AllReduceCapacities& capacities() const { return capacities_; }
  [[nodiscard]] RankMemory memory(int rank) const;
  [[nodiscard]] LocalControl& control(int rank) const { return *memory(rank).control; }
  // The first fault that the rank reported; its kind is kNone where there is none.
  [[nodiscard]] AllReduceFault fault(int rank) const;
  [[nodiscard]] bool intact() const;

 private:
  [[nodiscard]] uint8_t* region(int rank) const;
  [[nodiscard]] uint8_t* region_end(int rank) const;

  int ranks_;
  AllReduceCapacities capacities_;
  PeerRegion layout_;
  uint64_t deadline_ns_;
  int64_t stride_ = 0;
  int64_t size_ = 0;
  uint8_t* base_ = nullptr;
};

// Memory that is shared between an input and an output.
enum class Alias { kNone, kResidual, kInputIsArOut, kInputIsResidualOut, kInputIsNormOut };

struct RankOptions {
  Alias alias = Alias::kNone;
  bool leaves_out_optional = false;  // MoE patterns: only the quantized outputs, or norm_out.
  uint8_t poison = 0xCC;
  int64_t misalignment = 0;  // Bytes by which tensors of elements are shifted.
};

// The tensors of one rank: inputs with the contents of `in`, outputs full of poison.
class RankTensors {
 public:
  RankTensors(const GoldenInputs& in, int rank, const RankOptions& options = {});

  [[nodiscard]] const AllReduceArgs& args() const { return args_; }
  // All buffers, in an order that the problem and the options determine.
  [[nodiscard]] std::vector<const GuardedBuffer*> buffers() const;
  // Describes the first difference from the model, or a store outside of the tensors; empty if
  // there is none.
  [[nodiscard]] std::string difference(const GoldenOutputs& expected) const;

 private:
  [[nodiscard]] TensorView add(const void* data, size_t bytes, DType dtype,
                               std::initializer_list<int64_t> shape, int64_t misalignment);
  [[nodiscard]] TensorView add_output(size_t bytes, DType dtype,
                                      std::initializer_list<int64_t> shape, int64_t misalignment);
  void add_moe_inputs(const GoldenInputs& in, const GoldenRank& rank, int64_t misalignment);
  void add_quantized(const GoldenInputs& in);

  AllReduceArgs args_;
  std::vector<GuardedBuffer> buffers_;
  BufferStyle style_;
};

// Random inputs of all ranks. `fill`: of what is summed and of the residual.
GoldenInputs random_inputs(const AllReduceProblem& problem, int ranks, Fill fill, uint64_t seed);

// Runs one call of one rank. The fault, if any, is the group's.
void run_rank(const RankGroup& group, int rank, const AllReduceImpl& impl,
              const AllReduceProblem& problem, const AllReduceArgs& args);
// Calls body(rank) in a thread for each rank.
void run_as_threads(int ranks, const std::function<void(int rank)>& body);
// Calls body(rank) in a process for each rank. Returns what the bodies return, 0 or more; a process
// that a signal killed has minus its number. Throws where a body does.
std::vector<int> run_as_processes(int ranks, const std::function<int(int rank)>& body);

}  // namespace narrowfloat::testing
