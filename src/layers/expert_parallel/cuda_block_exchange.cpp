// Expert parallelism by blocks that a collective moves between GPUs. Blocks are padded to
// max_tokens rows, so no rank needs to know what another sends. All parts of the tokens for a rank
// are one block:
//
//   | count, 16 bytes | values | scales | row scales | ids | weights |      16-byte aligned
//
// After the exchange a kernel copies the rows that were sent to the parts of ExpertLayout, where
// those of all ranks are one tensor. Results are one part, whose blocks travel as they lie.
#include <algorithm>
#include <array>
#include <utility>

#include "base/int_math.h"
#include "layers/expert_parallel/cuda_exchange.h"
#include "runtime/cuda/device_memory.h"

namespace narrowfloat {
namespace {

constexpr int64_t kPartAlignment = 16;

class CudaBlockExchange final : public CudaExchange {
 public:
  CudaBlockExchange(const ExpertLayout& layout, int rank, Device device,
                    std::shared_ptr<Bootstrap> bootstrap, std::unique_ptr<BlockTransport> blocks)
      : layout_(layout),
        rank_(rank),
        is_gathered_(blocks->transport() == ExpertTransport::kAllGather),
        bootstrap_(std::move(bootstrap)),
        blocks_(std::move(blocks)) {
    for (const ExpertPart part : kTokenParts) {
      offsets_[static_cast<size_t>(part)] = token_block_;
      const ExpertLayout::Place& place = layout.place(part);
      token_block_ += round_up(place.block_bytes, kPartAlignment);
    }
    result_block_ = layout.place(ExpertPart::kResults).block_bytes;
    own_ = allocate_device_memory(device, layout.size_bytes);
    sent_ = allocate_device_memory(device, layout.ranks * token_block_);
    received_ = allocate_device_memory(device, received_bytes());
  }

  [[nodiscard]] ExpertTransport transport() const override { return blocks_->transport(); }
  [[nodiscard]] int64_t memory_bytes() const override {
    return layout_.size_bytes + layout_.ranks * token_block_ + received_bytes();
  }
  [[nodiscard]] uint8_t* own() const override { return own_.get(); }
  void describe(RankMemory& memory) const override {
    memory.rank = 0;
    memory.ranks = 1;
    memory.regions[0] = own_.get();
  }

  // The own block is stored where it would arrive, if it does not travel.
  [[nodiscard]] RankPointers outgoing() const override {
    RankPointers pointers;
    for (int rank = 0; rank < layout_.ranks; ++rank) {
      uint8_t* const memory = rank == rank_ && !is_gathered_ ? received_.get() : sent_.get();
      pointers.at[rank] = memory + rank * token_block_;
    }
    return pointers;
  }
  [[nodiscard]] int64_t outgoing_offset(ExpertPart part) const override {
    return offsets_[static_cast<size_t>(part)];
  }
  [[nodiscard]] SentBlocks incoming(ExpertPart part) const override {
    return {.first = arrived(token_block_, 0) + outgoing_offset(part),
            .stride = token_block_ * (is_gathered_ ? layout_.ranks : 1)};
  }
  [[nodiscard]] bool arrives_in_place() const override { return false; }
  [[nodiscard]] RankPointers returned() const override {
    RankPointers pointers;
    for (int rank = 0; rank < layout_.ranks; ++rank) {
      pointers.at[rank] =
          rank == rank_ ? results() + rank * result_block_ : arrived(result_block_, rank);
    }
    return pointers;
  }
  [[nodiscard]] int64_t token_flags() const override { return kNoFlags; }
  [[nodiscard]] int64_t result_flags() const override { return kNoFlags; }

  void start_tokens(Stream stream) override {
    blocks_->start(sent_.get(), received_.get(), token_block_, stream);
  }
  void start_results(Stream stream) override {
    blocks_->start(results(), received_.get(), result_block_, stream);
  }
  EndOfExchange finish(Stream stream) override { return blocks_->finish(stream); }
  void check() override { blocks_->check(); }
  bool give_up() override {
    blocks_->abort("this rank gave up");
    return true;
  }
  void connect() override {
    blocks_->connect(sent_.get(), received_.get(), token_block_);
    blocks_->connect(results(), received_.get(), result_block_);
  }
  [[nodiscard]] bool has_other_processes() const override { return bootstrap_ != nullptr; }
  void disconnect() override { bootstrap_->barrier(); }

 private:
  [[nodiscard]] uint8_t* results() const {
    return own_.get() + layout_.place(ExpertPart::kResults).offset;
  }
  // The block that `source` sends to this rank arrives here.
  [[nodiscard]] uint8_t* arrived(int64_t block_bytes, int source) const {
    const int64_t block = is_gathered_ ? int64_t{source} * layout_.ranks + rank_ : source;
    return received_.get() + block * block_bytes;
  }
  // Tokens and results arrive in the same memory: the ones are read before the others come.
  [[nodiscard]] int64_t received_bytes() const {
    const int64_t blocks = is_gathered_ ? int64_t{layout_.ranks} * layout_.ranks : layout_.ranks;
    return blocks * std::max(token_block_, result_block_);
  }

  ExpertLayout layout_;
  int rank_;
  bool is_gathered_;
  std::shared_ptr<Bootstrap> bootstrap_;
  std::array<int64_t, kNumExpertParts> offsets_{};
  int64_t token_block_ = 0;
  int64_t result_block_ = 0;
  std::shared_ptr<uint8_t> own_;
  std::shared_ptr<uint8_t> sent_;
  std::shared_ptr<uint8_t> received_;
  std::unique_ptr<BlockTransport> blocks_;  // It ends before the memory that it uses.
};

}  // namespace

std::unique_ptr<CudaExchange> make_cuda_block_exchange(const ExpertLayout& layout, int rank,
                                                       Device device,
                                                       std::shared_ptr<Bootstrap> bootstrap,
                                                       std::unique_ptr<BlockTransport> blocks) {
  return std::make_unique<CudaBlockExchange>(layout, rank, device, std::move(bootstrap),
                                             std::move(blocks));
}

}  // namespace narrowfloat
