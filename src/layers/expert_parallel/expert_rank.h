// One rank of expert parallelism: its plan, its buffers, and the steps of a call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "layers/expert_parallel/dispatch_plan.h"
#include "layers/expert_parallel/expert_exchange.h"
#include "layers/expert_parallel/payload_rows.h"

namespace narrowfloat {

class ExpertParallel::Impl {
 public:
  Impl(const ExpertParallelConfig& config, const ExpertLayout& layout, int rank,
       std::unique_ptr<ExpertExchange> exchange);

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] const ExpertLayout& layout() const { return layout_; }
  [[nodiscard]] const ExpertParallelConfig& config() const { return config_; }
  [[nodiscard]] ExpertExchange& exchange() const { return *exchange_; }
  [[nodiscard]] ExpertShard shard() const {
    return expert_shard(num_places_, layout_.ranks, rank_);
  }
  [[nodiscard]] int64_t memory_bytes() const {
    return exchange_->memory_bytes() + payload_.bytes() + static_cast<int64_t>(returned_.size());
  }

  void check_dispatch(const CodedRows& rows, const TensorView& ids,
                      const TensorView& weights) const;
  ReceivedTokens dispatch(const CodedRows& rows, const TensorView& ids, const TensorView& weights);
  [[nodiscard]] TensorView results() const;
  void check_call(uint64_t call) const;
  void check_output(int64_t tokens, const TensorView& out) const;
  void combine(const TensorView& out);
  void check_layer(const MoeLayer& layer, const TensorView& workspace) const;
  void run_experts(const MoeLayer& layer, const ReceivedTokens& received,
                   const TensorView& workspace) const;
  [[nodiscard]] int64_t required_workspace(const MoeLayer& layer) const;
  void give_up() { exchange_->give_up(); }
  [[nodiscard]] int64_t tokens() const { return plan_.tokens; }

 private:
  // Places in run()'s workspace for CombineOrder::kTopK; the layer's own one comes first.
  struct SlotRows {
    int64_t rows_offset = 0;
    int64_t map_offset = 0;
    int64_t bytes = 0;
  };

  // Why there are no tokens whose results combine() could send.
  [[nodiscard]] std::string why_idle() const;
  [[nodiscard]] bool is_topk() const { return config_.order == CombineOrder::kTopK; }
  // One row of H values that travels back.
  [[nodiscard]] int64_t result_row_bytes() const {
    return config_.hidden * bits(config_.result_dtype) / 8;
  }
  [[nodiscard]] SlotRows slot_rows(const MoeLayer& layer) const;
  // Keeps the places that ids name, -1 for those that name no expert; returns them as [T, k].
  TensorView find_places(const TensorView& ids);
  void pack(const CodedRows& rows, const TensorView& ids, const TensorView& weights);
  [[nodiscard]] ReceivedTokens finish_received();
  // Copies the rows of results that belong to this rank's tokens side by side; returns how many.
  int64_t gather_returned(std::vector<int32_t>& slot_to_row);

  ExpertParallelConfig config_;
  ExpertLayout layout_;
  int rank_;
  int32_t num_places_;
  std::vector<int32_t> place_of_expert_;
  std::unique_ptr<ExpertExchange> exchange_;
  PayloadRows payload_;
  DispatchPlan plan_;
  std::vector<int32_t> ids_;    // The places of the last dispatch.
  std::vector<float> weights_;  // CombineOrder::kTopK: those of the last dispatch.
  std::vector<std::byte> returned_;
  uint64_t call_ = 0;
  bool is_dispatched_ = false;
};

}  // namespace narrowfloat
