// A rank on the CPU: it packs rows into the blocks of an ExpertExchange and sums what came back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "layers/expert_parallel/expert_exchange.h"
#include "layers/expert_parallel/expert_rank.h"

namespace narrowfloat {

class CpuExpertRank final : public ExpertParallel::Impl {
 public:
  CpuExpertRank(const ExpertParallelConfig& config, const ExpertLayout& layout, int rank,
                std::unique_ptr<ExpertExchange> exchange);

  [[nodiscard]] ExpertTransport transport() const override { return exchange_->transport(); }
  [[nodiscard]] int64_t memory_bytes() const override {
    return exchange_->memory_bytes() + payload().bytes() + static_cast<int64_t>(returned_.size());
  }
  void disconnect() override { exchange_->disconnect(); }

 private:
  void check_exchange() const override { exchange_->check(); }
  void tell_peers_to_give_up(Stream /*stream*/) override { exchange_->give_up(call()); }
  void send_tokens(const CodedRows& rows, const TensorView& ids, const TensorView& weights,
                   Stream stream) override;
  void receive_tokens(Stream stream) override;
  void send_results(Stream /*stream*/) override { exchange_->send_results(); }
  void sum_results(const TensorView& out, Stream stream) override;
  void store_slots(const std::byte* rows, const int32_t* slot_to_row, int64_t slots,
                   Stream stream) const override;
  [[nodiscard]] std::byte* received(ExpertPart part) const override {
    return exchange_->received(part);
  }
  [[nodiscard]] std::byte* own_results() const override { return exchange_->results(); }

  // Keeps the places that ids name, -1 for those that name no expert; returns them as [T, k].
  TensorView find_places(const TensorView& ids);
  void pack(const CodedRows& rows, const TensorView& ids, const TensorView& weights);
  // Copies the rows of results that belong to this rank's tokens side by side; returns how many.
  int64_t gather_returned(std::vector<int32_t>& slot_to_row);

  std::unique_ptr<ExpertExchange> exchange_;
  DispatchPlan plan_;
  std::vector<int32_t> ids_;    // The places of the last dispatch.
  std::vector<float> weights_;  // CombineOrder::kTopK: those of the last dispatch.
  std::vector<std::byte> returned_;
};

}  // namespace narrowfloat
