// Blocks over NCCL, on a stream of their own, so that other work runs between the halves of a call.
// A call that a peer does not come to is aborted after its deadline (nccl_watchdog.h).
#include <utility>
#include <vector>

#include "layers/expert_parallel/block_transport.h"
#include "ops/allreduce/nccl_watchdog.h"
#include "runtime/comm/phase.h"
#include "runtime/cuda/nccl.h"
#include "runtime/cuda/side_stream.h"

namespace narrowfloat {
namespace {

class NcclBlocks final : public BlockTransport {
 public:
  NcclBlocks(const Bootstrap& bootstrap, std::unique_ptr<NcclCommunicator> nccl, Device device,
             ExpertTransport transport, std::chrono::milliseconds deadline)
      : nccl_(std::move(nccl)),
        watchdog_(*nccl_, device, deadline),
        beside_(device),
        transport_(transport),
        rank_(bootstrap.rank()),
        ranks_(bootstrap.size()) {}

  [[nodiscard]] ExpertTransport transport() const override { return transport_; }

  // NCCL connects ranks in their first exchange. Only the host waits here, until the deadline of
  // the bootstrap: the exchange itself ends when all ranks have come.
  void connect(const uint8_t* sent, uint8_t* received, int64_t block_bytes) override {
    move(sent, received, block_bytes, {});
  }
  void start(const uint8_t* sent, uint8_t* received, int64_t block_bytes, Stream stream) override {
    watchdog_.begin(stream);
    move(sent, received, block_bytes, beside_.fork(stream));
  }
  EndOfExchange finish(Stream stream) override {
    beside_.join(stream);
    return watchdog_.end(stream);
  }

  void check() override { nccl_->check_error(); }
  void abort(const std::string& reason) override { nccl_->abort(reason); }

 private:
  void move(const uint8_t* sent, uint8_t* received, int64_t block_bytes, Stream stream) {
    if (transport_ == ExpertTransport::kAllGather) {
      return nccl_->all_gather(sent, received, ranks_ * block_bytes, stream);
    }
    std::vector<NcclCommunicator::Part> parts;
    for (int64_t peer = 0; peer < ranks_; ++peer) {
      parts.push_back({peer * block_bytes, peer == rank_ ? 0 : block_bytes});
    }
    nccl_->exchange(sent, parts, received, parts, stream);
  }

  std::unique_ptr<NcclCommunicator> nccl_;
  NcclWatchdog watchdog_;
  SideStream beside_;
  ExpertTransport transport_;
  int rank_;
  int ranks_;
};

}  // namespace

std::unique_ptr<BlockTransport> make_nccl_blocks(Bootstrap& bootstrap, Device device,
                                                 ExpertTransport transport,
                                                 std::chrono::milliseconds deadline) {
  auto nccl = NcclCommunicator::create(bootstrap, device, bootstrap.deadline());
  std::unique_ptr<BlockTransport> made;
  run_phase(bootstrap, "expert parallelism: NCCL", [&] {
    made = std::make_unique<NcclBlocks>(bootstrap, std::move(nccl), device, transport, deadline);
  });
  return made;
}

}  // namespace narrowfloat
