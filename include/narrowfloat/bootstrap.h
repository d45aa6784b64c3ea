// Bootstrap: how the ranks of a group find each other and exchange small messages on the host,
// before and beside the fast transports of a workspace (allreduce.h).
//
// Every call blocks until all ranks have made it or the deadline passes. Then it throws kDevice
// with the ranks that are missing. A group is always explicit: ranks 0 to size - 1 of one
// bootstrap, never "all processes".
//
// All ranks make the same calls in the same order, each from one thread at a time. A call that
// failed may leave the ranks out of step, so all later calls on that bootstrap throw kDevice; an
// error that all ranks throw together (agree(), require_equal()) does not count as one.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "narrowfloat/error.h"
#include "narrowfloat/export.h"

namespace narrowfloat {

// The place of a process in its group. local_rank counts the ranks of one host; it is the usual
// index of the GPU.
struct RankInfo {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  std::string launcher = "arguments";  // Or "torchrun", "Open MPI", "MPICH", "Slurm".
  // The same text on all ranks of a job and another one for every job, so that two jobs that share
  // a directory or port cannot meet. Empty where the launcher gives none.
  std::string job_id;
};

// Reads the place of this process from the environment of torchrun (RANK and WORLD_SIZE), Open MPI
// (OMPI_COMM_WORLD_RANK), MPICH and Hydra (PMI_RANK) or Slurm (SLURM_PROCID and SLURM_STEP_ID, that
// is, a task of srun), in this order. Empty where no launcher has started this process. Throws
// kInvalidArgument for values that are no numbers or contradict each other (rank >= size), and
// where a launcher's size or local rank is missing.
NARROWFLOAT_API std::optional<RankInfo> discover_rank();

class NARROWFLOAT_API Bootstrap {
 public:
  using Milliseconds = std::chrono::milliseconds;
  static constexpr Milliseconds kDefaultDeadline{60'000};

  // Throws kInvalidArgument unless 0 <= rank < size, 0 <= local_rank and 0 < deadline.
  explicit Bootstrap(RankInfo info, Milliseconds deadline = kDefaultDeadline);
  Bootstrap(const Bootstrap&) = delete;
  Bootstrap& operator=(const Bootstrap&) = delete;
  virtual ~Bootstrap();

  [[nodiscard]] const RankInfo& info() const { return info_; }
  [[nodiscard]] int rank() const { return info_.rank; }
  [[nodiscard]] int size() const { return info_.size; }
  [[nodiscard]] Milliseconds deadline() const { return deadline_; }

  // Collective. all: size() * mine.size() bytes, the messages of ranks 0, 1, ... Does not overlap
  // mine. All ranks give messages of one length, or all throw kInvalidArgument.
  virtual void all_gather(std::span<const std::byte> mine, std::span<std::byte> all) = 0;

  // Collectives on top of all_gather().
  void barrier();
  void broadcast(std::span<std::byte> data, int root);
  // Gathers texts of any length.
  std::vector<std::string> gather_texts(const std::string& mine);
  // Ends a phase: where any rank passes an error, all ranks throw one error that names the phase,
  // the ranks and their messages, with the kind of the lowest of those ranks.
  void agree(const std::string& phase, const Error* error);
  // Throws kInvalidArgument on all ranks unless all gave the same text; the message shows those
  // that differ.
  void require_equal(const std::string& what, const std::string& mine);

 private:
  RankInfo info_;
  Milliseconds deadline_;
};

// Files in a directory that exists and that all ranks see. The job id is part of their names. An
// earlier job of the same id that crashed does no harm, but two such jobs must not run at the same
// time: where the job id is empty, the directory must be that of one job. The last rank to be
// destroyed removes what is left of the files, and nobody waits for it; if a rank has died, the
// last messages of the others stay.
NARROWFLOAT_API std::unique_ptr<Bootstrap> make_file_bootstrap(
    const std::string& directory, const RankInfo& info,
    Bootstrap::Milliseconds deadline = Bootstrap::kDefaultDeadline);

// Rank 0 listens on host:port, the others connect, retrying until the deadline. A peer with another
// job id or size is refused and throws kInvalidArgument; so is the second one of two with the same
// rank. Rank 0 binds a numeric address or "localhost" alone, and all interfaces for another name.
// Once all have met, the end of any process is an error of all at once. Host names are looked up
// within the time limits of the system's resolver.
NARROWFLOAT_API std::unique_ptr<Bootstrap> make_tcp_bootstrap(
    const std::string& host, int port, const RankInfo& info,
    Bootstrap::Milliseconds deadline = Bootstrap::kDefaultDeadline);

// A function that gathers: wraps an object all-gather of torch.distributed, an MPI_Allgather, and
// so on. It must keep a deadline of its own; what it throws reaches the caller. It is called twice
// for each all_gather(), with the sizes first, and never for a group of one rank.
using GatherFunction =
    std::function<void(std::span<const std::byte> mine, std::span<std::byte> all)>;
NARROWFLOAT_API std::unique_ptr<Bootstrap> make_callback_bootstrap(const RankInfo& info,
                                                                   GatherFunction gather);

// Memory that processes share which are forked after its creation, or that threads share: one
// rendezvous page for `size` ranks. Create it before fork(), before any CUDA call.
class NARROWFLOAT_API SharedRendezvous {
 public:
  explicit SharedRendezvous(int size);
  ~SharedRendezvous();
  SharedRendezvous(const SharedRendezvous&) = delete;
  SharedRendezvous& operator=(const SharedRendezvous&) = delete;

  // The bootstrap of one rank; called in the process or thread of that rank, once. It uses this
  // object, which must outlive it. Its job id is random and the same on all ranks.
  [[nodiscard]] std::unique_ptr<Bootstrap> bootstrap(
      int rank, Bootstrap::Milliseconds deadline = Bootstrap::kDefaultDeadline);

 private:
  int size_;
  void* page_;
};

// Chooses by the environment: discover_rank(), then TCP to NARROWFLOAT_ADDRESS=host:port, or files
// in NARROWFLOAT_RENDEZVOUS=directory, or what the launcher offers. Slurm: TCP to the first host of
// the node list, at a port from 20000 to 29999 that follows from the job id. Others, if all ranks
// are on one host and the job has an id: files in a directory of the job under the temporary
// directory. torchrun's MASTER_PORT is never bound. Throws kInvalidArgument where no launcher is
// found or it offers nothing, and says which variables would help.
NARROWFLOAT_API std::unique_ptr<Bootstrap> make_environment_bootstrap(
    Bootstrap::Milliseconds deadline = Bootstrap::kDefaultDeadline);

}  // namespace narrowfloat
