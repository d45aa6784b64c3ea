// A communicator of NCCL, which is loaded at run time (nccl_library.h); nothing links against it.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "narrowfloat/allreduce.h"
#include "narrowfloat/bootstrap.h"

namespace narrowfloat {

// A communicator over the ranks of a bootstrap. It is not blocking: a call that NCCL goes on with
// in the background is waited for until the deadline. A call that fails or is late throws kDevice
// and aborts the communicator, which then refuses all calls. Calls can be captured into graphs.
// Another thread may call abort().
class NcclCommunicator {
 public:
  // Collective; every rank has a GPU of its own and the same version of NCCL. Throws kDevice on all
  // ranks where one fails, or is missing at the deadline (at most half of the bootstrap's);
  // kUnsupported where NCCL is not found.
  static std::unique_ptr<NcclCommunicator> create(Bootstrap& bootstrap, Device device,
                                                  std::chrono::milliseconds deadline);
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;
  // Waits for this rank's calls until the deadline, then aborts them. Graphs that hold calls of the
  // communicator are destroyed before it.
  ~NcclCommunicator();

  // Sums `count` elements of F16, BF16 or F32 over the ranks, in NCCL's own order.
  void all_reduce(const void* input, void* output, int64_t count, DType element, Stream stream);

  // Sends part sends[r] of `input` to rank r, and receives receives[r] of `output` from it. Both
  // ranks give the same size. Empty parts are left out. The own part is copied, unless it already
  // lies where it belongs.
  struct Part {
    int64_t offset = 0;
    int64_t size_bytes = 0;
  };
  void exchange(const void* input, std::span<const Part> sends, void* output,
                std::span<const Part> receives, Stream stream);

  // Gathers size_bytes from each rank in rank order. input may be output + rank * size_bytes.
  void all_gather(const void* input, void* output, int64_t size_bytes, Stream stream);

  // Throws kDevice where a call has failed after it was queued; aborts the communicator then.
  void check_error();

  // Ends the communicator and its kernels, which otherwise wait for peers without end. Every later
  // call throws kDevice with the reason.
  void abort(const std::string& reason);

 private:
  class Impl;
  explicit NcclCommunicator(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace narrowfloat
