// A rank on a GPU: kernels plan where rows go, store them in the blocks of an exchange, and sum
// what came back (ops/expert_exchange). It needs no CUDA header.
#pragma once

#include <cstdint>
#include <memory>

#include "layers/expert_parallel/cuda_exchange.h"
#include "layers/expert_parallel/expert_rank.h"
#include "ops/expert_exchange/expert_exchange_sm90.h"

namespace narrowfloat {

class CudaExpertRank final : public ExpertParallel::Impl {
 public:
  // Returns when this rank's flags are cleared; no rank may send before all are.
  CudaExpertRank(const ExpertParallelConfig& config, const ExpertLayout& layout, int rank,
                 Device device, std::unique_ptr<CudaExchange> exchange,
                 std::chrono::milliseconds deadline);

  [[nodiscard]] ExpertTransport transport() const override { return exchange_->transport(); }
  [[nodiscard]] int64_t memory_bytes() const override;
  // Collective, before the first call.
  void connect() { exchange_->connect(); }
  void disconnect() override;

 private:
  void check_exchange() const override;
  void tell_peers_to_give_up(Stream stream) override;
  void send_tokens(const CodedRows& rows, const TensorView& ids, const TensorView& weights,
                   Stream stream) override;
  void receive_tokens(Stream stream) override;
  void send_results(Stream stream) override;
  void sum_results(const TensorView& out, Stream stream) override;
  void store_slots(const std::byte* rows, const int32_t* slot_to_row, int64_t slots,
                   Stream stream) const override;
  [[nodiscard]] std::byte* received(ExpertPart part) const override;
  [[nodiscard]] std::byte* own_results() const override { return received(ExpertPart::kResults); }

  void allocate_plan();
  // Queues the end of an exchange; the next kernel is launched on `stream` as it is then.
  EndOfExchange finish_exchange(Stream& stream) const;
  // A part of dense rows.
  void add_part(SendTokens& args, ExpertPart part, const TensorView& rows) const;
  // Scales of any strides.
  void add_scales(SendTokens& args, const TensorView& scales) const;

  std::unique_ptr<CudaExchange> exchange_;
  std::chrono::milliseconds deadline_;
  std::shared_ptr<uint8_t> fault_;
  std::shared_ptr<uint8_t> control_;
  std::shared_ptr<uint8_t> plan_memory_;
  std::shared_ptr<uint8_t> places_;  // I32 [experts]; null: expert e is at place e.
  int64_t plan_bytes_ = 0;
  RankMemory view_;
  ExchangePlan plan_;
};

}  // namespace narrowfloat
