// How rows reach the ranks of their experts, and how results come back. The blocks are those of
// ExpertLayout; a transport decides where they lie and how they travel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "layers/expert_parallel/expert_layout.h"
#include "narrowfloat/bootstrap.h"
#include "runtime/comm/symmetric_memory.h"

namespace narrowfloat {

class ExpertExchange {
 public:
  ExpertExchange() = default;
  ExpertExchange(const ExpertExchange&) = delete;
  ExpertExchange& operator=(const ExpertExchange&) = delete;
  virtual ~ExpertExchange() = default;

  [[nodiscard]] virtual ExpertTransport transport() const = 0;
  [[nodiscard]] virtual int64_t memory_bytes() const = 0;
  // Returns where this rank stores the block of a token part that goes to `destination`.
  [[nodiscard]] virtual std::byte* outgoing(ExpertPart part, int destination) = 0;
  // The blocks of all sources.
  [[nodiscard]] virtual std::byte* received(ExpertPart part) = 0;
  // Returns where this rank stores its results, a block for each source.
  [[nodiscard]] virtual std::byte* results() = 0;
  // The block of results that `destination` computed for this rank.
  [[nodiscard]] virtual const std::byte* returned(int destination) = 0;

  // Throws kDevice where an earlier exchange has failed.
  virtual void check() = 0;
  // Collective. The wait_ functions return when the data of all ranks are here. They throw kDevice
  // where a rank is late, or what a function of the caller throws; the exchange is then of no more
  // use.
  virtual void send_tokens() = 0;
  virtual void wait_for_tokens() = 0;
  virtual void send_results() = 0;
  virtual void wait_for_results() = 0;
  // This rank cannot go on with call number `call`: the others need not wait for it.
  virtual void give_up(uint64_t call) = 0;
  // Collective: the peers' memory is not used any more.
  virtual void disconnect() = 0;
};

// Nanoseconds of a deadline, of at most a century: those of much longer ones do not fit.
uint64_t nanoseconds_of(std::chrono::milliseconds deadline);

// bootstrap: null for the ranks of one process.
std::unique_ptr<ExpertExchange> make_peer_exchange(const ExpertLayout& layout,
                                                   std::shared_ptr<Bootstrap> bootstrap,
                                                   std::shared_ptr<SymmetricMemory> memory,
                                                   std::chrono::milliseconds deadline);
// kAllToAll with a function, kAllGather without one.
std::unique_ptr<ExpertExchange> make_collective_exchange(const ExpertLayout& layout,
                                                         std::shared_ptr<Bootstrap> bootstrap,
                                                         AllToAllFunction all_to_all);

}  // namespace narrowfloat
