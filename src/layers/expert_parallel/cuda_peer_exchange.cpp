// Expert parallelism through memory that GPUs map: kernels store rows where the receiver reads
// them, and read results there. The two flags of a call are those of peer_exchange.cpp.
#include <algorithm>
#include <utility>

#include "layers/expert_parallel/cuda_exchange.h"

namespace narrowfloat {
namespace {

class CudaPeerExchange final : public CudaExchange {
 public:
  CudaPeerExchange(const ExpertLayout& layout, std::shared_ptr<Bootstrap> bootstrap,
                   std::shared_ptr<SymmetricMemory> memory)
      : layout_(layout), bootstrap_(std::move(bootstrap)), memory_(std::move(memory)) {}

  [[nodiscard]] ExpertTransport transport() const override { return ExpertTransport::kPeerMemory; }
  [[nodiscard]] int64_t memory_bytes() const override { return layout_.size_bytes; }
  [[nodiscard]] uint8_t* own() const override { return memory_->own(); }
  void describe(RankMemory& memory) const override {
    memory.rank = memory_->rank();
    memory.ranks = memory_->ranks();
    std::copy_n(regions(0).at, layout_.ranks, memory.regions);
  }

  [[nodiscard]] RankPointers outgoing() const override { return regions(0); }
  [[nodiscard]] int64_t outgoing_offset(ExpertPart part) const override { return own_block(part); }
  [[nodiscard]] SentBlocks incoming(ExpertPart part) const override {
    const ExpertLayout::Place& place = layout_.place(part);
    return {.first = memory_->own() + place.offset, .stride = place.block_bytes};
  }
  [[nodiscard]] bool arrives_in_place() const override { return true; }
  [[nodiscard]] RankPointers returned() const override {
    return regions(own_block(ExpertPart::kResults));
  }
  [[nodiscard]] int64_t token_flags() const override { return layout_.token_flags; }
  [[nodiscard]] int64_t result_flags() const override { return layout_.result_flags; }

  void start_tokens(Stream /*stream*/) override {}
  void start_results(Stream /*stream*/) override {}
  EndOfExchange finish(Stream /*stream*/) override { return {}; }
  void check() override {}
  bool give_up() override { return false; }
  void connect() override {}
  [[nodiscard]] bool has_other_processes() const override { return bootstrap_ != nullptr; }
  void disconnect() override {
    bootstrap_->barrier();
    memory_->unmap_peers();
    bootstrap_->barrier();
  }

 private:
  [[nodiscard]] RankPointers regions(int64_t offset) const {
    RankPointers pointers;
    for (int rank = 0; rank < layout_.ranks; ++rank) {
      pointers.at[rank] = memory_->region(rank) + offset;
    }
    return pointers;
  }
  // This rank's block in a part of another's memory.
  [[nodiscard]] int64_t own_block(ExpertPart part) const {
    const ExpertLayout::Place& place = layout_.place(part);
    return place.offset + memory_->rank() * place.block_bytes;
  }

  ExpertLayout layout_;
  std::shared_ptr<Bootstrap> bootstrap_;
  std::shared_ptr<SymmetricMemory> memory_;
};

}  // namespace

std::unique_ptr<CudaExchange> make_cuda_peer_exchange(const ExpertLayout& layout,
                                                      std::shared_ptr<Bootstrap> bootstrap,
                                                      std::shared_ptr<SymmetricMemory> memory) {
  return std::make_unique<CudaPeerExchange>(layout, std::move(bootstrap), std::move(memory));
}

}  // namespace narrowfloat
