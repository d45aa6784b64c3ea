// One rank's workspace: its memory as the protocols see it, its engines, and the error of a call.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "narrowfloat/allreduce.h"
#include "ops/allreduce/allreduce_problem.h"
#include "runtime/comm/symmetric_memory.h"

namespace narrowfloat {

class AllReduceWorkspace::Impl {
 public:
  // `bootstrap` is null for the ranks of one process. `memory` is null where peers cannot be
  // reached.
  Impl(const AllReduceWorkspaceOptions& options, int rank, int ranks,
       std::shared_ptr<Bootstrap> bootstrap, std::unique_ptr<SymmetricMemory> memory,
       const LaunchLimits& limits);
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  // Collective: loads NCCL and makes its communicator, on GPUs where all ranks have it.
  void connect_nccl();
  // Waits for the kernels of all streams.
  void wait_for_calls() const;
  // Waits for the device, clears this rank's own memory and its error, and waits until that is
  // done.
  void clear();
  // Collective: makes NCCL's communicator again where a failure of it ended one.
  void reconnect_nccl();
  // Ends the use of the peers' memory.
  void unmap_peers();
  void throw_if_failed() const;
  // Before the first call (or every call, as the options say): throws on all ranks if one passes an
  // error or gives another call. Ranks of one process share their caller and are not compared.
  void agree_on(const AllReduceCall& call, const std::string& scalars, const Error* error);
  [[nodiscard]] bool must_agree() const;

  [[nodiscard]] AllReduceCall call_of(const AllReduceProblem& problem) const;
  [[nodiscard]] AllReduceEngines engines() const;

  [[nodiscard]] int rank() const { return view_.rank; }
  [[nodiscard]] int ranks() const { return view_.ranks; }
  [[nodiscard]] const RankMemory& view() const { return view_; }
  [[nodiscard]] const AllReduceWorkspaceOptions& options() const { return options_; }
  [[nodiscard]] Bootstrap* bootstrap() const { return bootstrap_.get(); }
  [[nodiscard]] AllReduceTransport transport() const;
  [[nodiscard]] int64_t nccl_bytes() const { return nccl_ == nullptr ? 0 : options_.nccl_bytes; }

 private:
  AllReduceWorkspaceOptions options_;  // Capacities are set.
  std::shared_ptr<Bootstrap> bootstrap_;
  std::unique_ptr<SymmetricMemory> memory_;
  LaunchLimits limits_;
  RankMemory view_;
  std::shared_ptr<uint8_t> fault_;
  std::shared_ptr<uint8_t> control_;  // Without peer memory, whose region has it.
  // Freed after the communicator, whose kernels may still use it.
  std::shared_ptr<uint8_t> nccl_scratch_;
  std::shared_ptr<NcclCommunicator> nccl_;
  std::shared_ptr<NcclWatchdog> nccl_watchdog_;
  bool has_agreed_ = false;
};

// Bytes of each of the two scratch areas of the NCCL algorithms, for messages of `nccl_bytes`.
int64_t nccl_scratch_bytes(int64_t nccl_bytes, int ranks);

}  // namespace narrowfloat
