// A block transport moves blocks of equal size between the GPUs of all ranks. It needs no CUDA
// header.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "comm/allreduce_args.h"
#include "narrowfloat/bootstrap.h"
#include "narrowfloat/expert_parallel.h"

namespace narrowfloat {

class BlockTransport {
 public:
  BlockTransport() = default;
  BlockTransport(const BlockTransport&) = delete;
  BlockTransport& operator=(const BlockTransport&) = delete;
  virtual ~BlockTransport() = default;

  // kAllToAll: block s of `received` comes from rank s; the own one is not moved.
  // kAllGather: `received` gets what all ranks send, one after another.
  [[nodiscard]] virtual ExpertTransport transport() const = 0;
  // Collective: makes the connections of exchanges with blocks of this size, on the host; the
  // memory gets any contents.
  virtual void connect(const uint8_t* sent, uint8_t* received, int64_t block_bytes) = 0;
  // Collective. sent: a block for each rank. It is read, and `received` written, by work that comes
  // after that of `stream` and that finish() waits for.
  virtual void start(const uint8_t* sent, uint8_t* received, int64_t block_bytes,
                     Stream stream) = 0;
  // Later work of the stream, the one of start() or one that events order after it, comes after the
  // exchange. The result is for the kernel that comes next.
  virtual EndOfExchange finish(Stream stream) = 0;
  // Throws kDevice where an exchange has failed.
  virtual void check() = 0;
  // Ends this rank's exchanges and refuses more. The other ranks have their deadline.
  virtual void abort(const std::string& reason) = 0;
};

// NCCL's (ncclSend and ncclRecv, or ncclAllGather). Collective; throws on all ranks where one
// fails. deadline: of an exchange on the GPU, from its start to its finish.
std::unique_ptr<BlockTransport> make_nccl_blocks(Bootstrap& bootstrap, Device device,
                                                 ExpertTransport transport,
                                                 std::chrono::milliseconds deadline);

}  // namespace narrowfloat
