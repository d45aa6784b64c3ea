// Expert parallelism through memory that all ranks map. A sender stores rows
// where the receiver reads them; the experts store results in their own memory, and the rank that
// sent the tokens reads them there.
//
// A call has two flags for each pair of ranks, set to the number of the call: "my tokens are with
// you", "my results are ready". A rank waits for the flags of all others, also of those to which it
// sent nothing. So no third one is needed: the tokens of call n + 1 are stored by a rank that has
// seen all results of call n, which were computed from what these tokens overwrite; and results of
// call n + 1 are stored after all ranks have sent their tokens n + 1, which each did after it had
// read the results of call n.
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/throw_error.h"
#include "comm/protocol.h"
#include "layers/expert_parallel/expert_exchange.h"
#include "ops/allreduce/cpu_cta.h"

namespace narrowfloat {
namespace {

class PeerExchange final : public ExpertExchange {
 public:
  PeerExchange(const ExpertLayout& layout, std::shared_ptr<Bootstrap> bootstrap,
               std::shared_ptr<SymmetricMemory> memory, std::chrono::milliseconds deadline)
      : layout_(layout),
        bootstrap_(std::move(bootstrap)),
        memory_(std::move(memory)),
        deadline_(deadline),
        control_(std::make_unique<LocalControl>()) {
    view_.rank = memory_->rank();
    view_.ranks = memory_->ranks();
    for (int rank = 0; rank < view_.ranks; ++rank) view_.regions[rank] = memory_->region(rank);
    view_.control = control_.get();
    view_.fault = &fault_;
    view_.layout.abort = layout.abort;
    view_.deadline_ns = nanoseconds_of(deadline);
    // Flags and abort cell.
    std::memset(memory_->own(), 0, static_cast<size_t>(layout.place(ExpertPart::kCounts).offset));
  }

  [[nodiscard]] ExpertTransport transport() const override { return ExpertTransport::kPeerMemory; }
  [[nodiscard]] int64_t memory_bytes() const override { return layout_.size_bytes; }

  std::byte* outgoing(ExpertPart part, int destination) override {
    return block(destination, part, view_.rank);
  }
  std::byte* received(ExpertPart part) override { return block(view_.rank, part, 0); }
  std::byte* results() override { return received(ExpertPart::kResults); }
  const std::byte* returned(int destination) override {
    return block(destination, ExpertPart::kResults, view_.rank);
  }

  void check() override {
    CpuCta cta(view_.rank, 0, 1);
    heed_abort(cta, view_, enter_call(cta, view_));
    throw_if_failed();
  }

  void send_tokens() override {
    ++call_;
    signal(layout_.token_flags, ProtocolPoint::kPushed);
  }
  void wait_for_tokens() override { wait(layout_.token_flags, "tokens", ProtocolPoint::kPolled); }
  void send_results() override { signal(layout_.result_flags, ProtocolPoint::kReduced); }
  void wait_for_results() override {
    wait(layout_.result_flags, "results", ProtocolPoint::kFinished);
  }

  void give_up(uint64_t call) override {
    call_ = static_cast<uint32_t>(call);
    CpuCta cta(view_.rank, 0, 1);
    abort_call(cta, view_,
               WaitFor{AllReduceFault::kAborted, static_cast<uint32_t>(view_.rank), call_});
  }

  void disconnect() override {
    if (bootstrap_ == nullptr) return;
    bootstrap_->barrier();
    memory_->unmap_peers();
    bootstrap_->barrier();
  }

 private:
  [[nodiscard]] std::byte* block(int owner, ExpertPart part, int source) {
    const ExpertLayout::Place& place = layout_.place(part);
    return reinterpret_cast<std::byte*>(view_.regions[owner] + place.offset +
                                        source * place.block_bytes);
  }
  [[nodiscard]] uint32_t* flag(int owner, int64_t flags, int source) {
    return reinterpret_cast<uint32_t*>(view_.regions[owner] + flags) + source;
  }

  void signal(int64_t flags, ProtocolPoint before) {
    CpuCta cta(view_.rank, 0, 1);
    cta.reached(before);
    for (int peer = 0; peer < view_.ranks; ++peer) {
      cta.store_release(flag(peer, flags, view_.rank), call_);
    }
  }

  void wait(int64_t flags, const char* what, ProtocolPoint after) {
    CpuCta cta(view_.rank, 0, 1);
    awaited_ = what;
    for (int peer = 0; peer < view_.ranks; ++peer) {
      const uint32_t* const arrived = flag(view_.rank, flags, peer);
      const auto missing = [&] {
        return WaitFor{AllReduceFault::kBarrierWait, static_cast<uint32_t>(peer), call_};
      };
      wait_until(cta, view_, missing, [&] { return cta.load_acquire(arrived) == call_; });
    }
    throw_if_failed();
    cta.reached(after);
  }

  void throw_if_failed() const {
    if (fault_.kind == AllReduceFault::kNone) return;
    const std::string reason = fault_.kind == AllReduceFault::kAborted
                                   ? "a rank gave up"
                                   : fmt::format("rank {} sent no {} within {} ms", fault_.peer,
                                                 awaited_, deadline_.count());
    throw_error(ErrorKind::kDevice,
                "expert parallelism: call {} failed on rank {} of {}: {}; make a new "
                "ExpertParallel on all ranks, or end the job",
                call_, view_.rank, view_.ranks, reason);
  }

  ExpertLayout layout_;
  std::shared_ptr<Bootstrap> bootstrap_;
  std::shared_ptr<SymmetricMemory> memory_;
  std::chrono::milliseconds deadline_;
  std::unique_ptr<LocalControl> control_;
  AllReduceFault fault_;
  RankMemory view_;
  uint32_t call_ = 0;
  const char* awaited_ = "tokens";  // The last wait was for these.
};

}  // namespace

uint64_t nanoseconds_of(std::chrono::milliseconds deadline) {
  constexpr uint64_t kNsPerMs = 1'000'000;
  constexpr std::chrono::milliseconds kLongest = std::chrono::hours(100 * 8760);
  return static_cast<uint64_t>(std::min(deadline, kLongest).count()) * kNsPerMs;
}

std::unique_ptr<ExpertExchange> make_peer_exchange(const ExpertLayout& layout,
                                                   std::shared_ptr<Bootstrap> bootstrap,
                                                   std::shared_ptr<SymmetricMemory> memory,
                                                   std::chrono::milliseconds deadline) {
  return std::make_unique<PeerExchange>(layout, std::move(bootstrap), std::move(memory), deadline);
}

}  // namespace narrowfloat
