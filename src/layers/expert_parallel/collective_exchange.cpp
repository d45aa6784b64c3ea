// Expert parallelism through a collective of the caller's, or the bootstrap's all_gather. Blocks
// are padded to max_tokens rows, so no rank needs to know what another sends.
#include <algorithm>
#include <utility>
#include <vector>

#include "base/throw_error.h"
#include "layers/expert_parallel/expert_exchange.h"

namespace narrowfloat {
namespace {

// Every rank receives all blocks and keeps its own.
AllToAllFunction all_to_all_by_gathering(std::shared_ptr<Bootstrap> bootstrap) {
  return [bootstrap = std::move(bootstrap), all = std::vector<std::byte>()](
             std::span<const std::byte> send, std::span<std::byte> receive) mutable {
    const auto ranks = static_cast<size_t>(bootstrap->size());
    const size_t block = send.size() / ranks;
    all.resize(send.size() * ranks);
    bootstrap->all_gather(send, all);
    for (size_t source = 0; source < ranks; ++source) {
      const auto own =
          all.begin() + static_cast<std::ptrdiff_t>(source * send.size() +
                                                    static_cast<size_t>(bootstrap->rank()) * block);
      std::copy_n(own, block, receive.begin() + static_cast<std::ptrdiff_t>(source * block));
    }
  };
}

class CollectiveExchange final : public ExpertExchange {
 public:
  CollectiveExchange(const ExpertLayout& layout, std::shared_ptr<Bootstrap> bootstrap,
                     AllToAllFunction all_to_all)
      : layout_(layout),
        transport_(all_to_all ? ExpertTransport::kAllToAll : ExpertTransport::kAllGather),
        all_to_all_(all_to_all ? std::move(all_to_all) : all_to_all_by_gathering(bootstrap)),
        bootstrap_(std::move(bootstrap)),
        sent_(static_cast<size_t>(layout.size_bytes)),
        received_(sent_.size()) {}

  [[nodiscard]] ExpertTransport transport() const override { return transport_; }
  [[nodiscard]] int64_t memory_bytes() const override {
    int64_t bytes = 2 * layout_.size_bytes;
    if (transport_ == ExpertTransport::kAllToAll) return bytes;
    int64_t most = 0;  // The largest part: it is gathered from all ranks.
    for (const ExpertLayout::Place& place : layout_.places) {
      most = std::max(most, place.block_bytes * layout_.ranks);
    }
    return bytes + most * layout_.ranks;
  }

  std::byte* outgoing(ExpertPart part, int destination) override {
    return at(sent_, part, destination);
  }
  std::byte* received(ExpertPart part) override { return at(received_, part, 0); }
  std::byte* results() override { return at(sent_, ExpertPart::kResults, 0); }
  const std::byte* returned(int destination) override {
    return at(received_, ExpertPart::kResults, destination);
  }

  void check() override {
    if (!has_failed_) return;
    throw_error(ErrorKind::kDevice,
                "expert parallelism: an earlier call failed on this rank; make a new "
                "ExpertParallel on all ranks, or end the job");
  }
  void send_tokens() override {}  // A collective sends and waits at once.
  void wait_for_tokens() override {
    for (const ExpertPart part : kTokenParts) exchange(part);
  }
  void send_results() override {}
  void wait_for_results() override { exchange(ExpertPart::kResults); }
  void give_up(uint64_t /*call*/) override { has_failed_ = true; }
  void disconnect() override { bootstrap_->barrier(); }

 private:
  [[nodiscard]] std::byte* at(std::vector<std::byte>& memory, ExpertPart part, int rank) const {
    const ExpertLayout::Place& place = layout_.place(part);
    return memory.data() + place.offset + rank * place.block_bytes;
  }

  void exchange(ExpertPart part) {
    const auto bytes = static_cast<size_t>(layout_.place(part).block_bytes * layout_.ranks);
    if (bytes == 0) return;
    has_failed_ = true;  // Stays so if the function throws.
    all_to_all_({at(sent_, part, 0), bytes}, {at(received_, part, 0), bytes});
    has_failed_ = false;
  }

  ExpertLayout layout_;
  ExpertTransport transport_;
  AllToAllFunction all_to_all_;
  std::shared_ptr<Bootstrap> bootstrap_;
  std::vector<std::byte> sent_;
  std::vector<std::byte> received_;
  bool has_failed_ = false;
};

}  // namespace

std::unique_ptr<ExpertExchange> make_collective_exchange(const ExpertLayout& layout,
                                                         std::shared_ptr<Bootstrap> bootstrap,
                                                         AllToAllFunction all_to_all) {
  return std::make_unique<CollectiveExchange>(layout, std::move(bootstrap), std::move(all_to_all));
}

}  // namespace narrowfloat
