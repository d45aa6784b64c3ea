// How blocks travel between ranks on GPUs. The kernels of ops/expert_exchange store and read them;
// a transport decides where they lie, and what moves them between two kernels. Everything is queued
// on streams. It needs no CUDA header.
#pragma once

#include <cstdint>
#include <memory>

#include "layers/expert_parallel/block_transport.h"
#include "layers/expert_parallel/expert_layout.h"
#include "narrowfloat/bootstrap.h"
#include "ops/expert_exchange/expert_exchange_sm90.h"
#include "runtime/comm/symmetric_memory.h"

namespace narrowfloat {

class CudaExchange {
 public:
  CudaExchange() = default;
  CudaExchange(const CudaExchange&) = delete;
  CudaExchange& operator=(const CudaExchange&) = delete;
  virtual ~CudaExchange() = default;

  [[nodiscard]] virtual ExpertTransport transport() const = 0;
  [[nodiscard]] virtual int64_t memory_bytes() const = 0;
  // This rank's memory, of ExpertLayout::size_bytes: what it has received, and its results.
  [[nodiscard]] virtual uint8_t* own() const = 0;
  // The ranks whose abort cells and flags the kernels see: all, or this one alone.
  virtual void describe(RankMemory& memory) const = 0;
  // The rows for each rank are stored here; a token part has an offset in each of these places.
  [[nodiscard]] virtual RankPointers outgoing() const = 0;
  [[nodiscard]] virtual int64_t outgoing_offset(ExpertPart part) const = 0;
  // A token part arrives here: in own() already, or elsewhere in this rank's memory.
  [[nodiscard]] virtual SentBlocks incoming(ExpertPart part) const = 0;
  [[nodiscard]] virtual bool arrives_in_place() const = 0;
  // The results that each rank has computed for this one lie here.
  [[nodiscard]] virtual RankPointers returned() const = 0;
  [[nodiscard]] virtual int64_t token_flags() const = 0;  // kNoFlags: there are none.
  [[nodiscard]] virtual int64_t result_flags() const = 0;

  // Queued after what stores the tokens or results, and before what reads those of the others. The
  // results of finish() are for that kernel.
  virtual void start_tokens(Stream stream) = 0;
  virtual void start_results(Stream stream) = 0;
  virtual EndOfExchange finish(Stream stream) = 0;

  // Throws kDevice where something has failed of which the kernels do not know.
  virtual void check() = 0;
  // True: the kernels need not tell the others.
  virtual bool give_up() = 0;
  // Collective, once before the first exchange, when all ranks have their memory.
  virtual void connect() = 0;
  // Whether other processes have ranks; else disconnect() has nothing to do.
  [[nodiscard]] virtual bool has_other_processes() const = 0;
  // Collective: waits until no rank uses this one's memory. The device has no work.
  virtual void disconnect() = 0;
};

// Stores into memory that all ranks map. bootstrap: null for the virtual ranks of one GPU.
std::unique_ptr<CudaExchange> make_cuda_peer_exchange(const ExpertLayout& layout,
                                                      std::shared_ptr<Bootstrap> bootstrap,
                                                      std::shared_ptr<SymmetricMemory> memory);

// Padded blocks that `blocks` moves. bootstrap: null for the virtual ranks of one GPU.
std::unique_ptr<CudaExchange> make_cuda_block_exchange(const ExpertLayout& layout, int rank,
                                                       Device device,
                                                       std::shared_ptr<Bootstrap> bootstrap,
                                                       std::unique_ptr<BlockTransport> blocks);

}  // namespace narrowfloat
