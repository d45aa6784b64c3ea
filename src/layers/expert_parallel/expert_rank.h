// One rank of expert parallelism: the state of a call, its checks, and the layer on received rows.
// How rows travel, and what sums them, is that of a device: cpu_expert_rank.h, cuda_expert_rank.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "layers/expert_parallel/dispatch_plan.h"
#include "layers/expert_parallel/expert_layout.h"
#include "layers/expert_parallel/payload_rows.h"

namespace narrowfloat {

class ExpertParallel::Impl {
 public:
  Impl(const ExpertParallelConfig& config, const ExpertLayout& layout, int rank, Device device);
  virtual ~Impl() = default;
  // The public object of a rank.
  static ExpertParallel wrap(std::unique_ptr<Impl> rank) { return ExpertParallel(std::move(rank)); }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] const ExpertLayout& layout() const { return layout_; }
  [[nodiscard]] const ExpertParallelConfig& config() const { return config_; }
  [[nodiscard]] ExpertShard shard() const {
    return expert_shard(num_places_, layout_.ranks, rank_);
  }
  [[nodiscard]] Device device() const { return device_; }
  [[nodiscard]] int64_t tokens() const { return tokens_; }

  // The check_ functions throw for arguments, at which the other functions do not look again.
  void check_dispatch(const CodedRows& rows, const TensorView& ids,
                      const TensorView& weights) const;
  void start_dispatch(const CodedRows& rows, const TensorView& ids, const TensorView& weights,
                      Stream stream);
  ReceivedTokens finish_dispatch(Stream stream);
  [[nodiscard]] TensorView results() const;
  void check_call(uint64_t call) const;
  void check_output(int64_t tokens, const TensorView& out) const;
  void start_combine(Stream stream);
  void check_finish_combine(const TensorView& out) const;
  void finish_combine(const TensorView& out, Stream stream);
  void check_layer(const MoeLayer& layer, const TensorView& workspace) const;
  void run_experts(const MoeLayer& layer, const ReceivedTokens& received,
                   const TensorView& workspace, Stream stream) const;
  [[nodiscard]] int64_t required_workspace(const MoeLayer& layer) const;

  [[nodiscard]] virtual ExpertTransport transport() const = 0;
  [[nodiscard]] virtual int64_t memory_bytes() const = 0;
  // Throws kDevice where an earlier call has failed, or this rank has given up.
  void check() const;
  void give_up(Stream stream);
  // Tells the others of an error that this rank throws, so that they need not wait for their
  // deadline.
  void give_up_after_error(Stream stream) noexcept;
  virtual void disconnect() = 0;

 protected:
  // Throws kDevice where a call is known to have failed. What give_up() queues on a GPU may show
  // later.
  virtual void check_exchange() const = 0;
  virtual void tell_peers_to_give_up(Stream stream) = 0;
  // The steps of a call, whose arguments were checked.
  virtual void send_tokens(const CodedRows& rows, const TensorView& ids, const TensorView& weights,
                           Stream stream) = 0;
  // Returns when, or queues what waits until, the rows of all ranks are here; ids of rows that
  // nobody sent are -1 then.
  virtual void receive_tokens(Stream stream) = 0;
  virtual void send_results(Stream stream) = 0;
  virtual void sum_results(const TensorView& out, Stream stream) = 0;
  // Stores the row slot_to_row[i] of `rows` as row i of the results, where it is not negative.
  virtual void store_slots(const std::byte* rows, const int32_t* slot_to_row, int64_t slots,
                           Stream stream) const = 0;
  // This rank's blocks of a token part, or of its results, one after another.
  [[nodiscard]] virtual std::byte* received(ExpertPart part) const = 0;
  [[nodiscard]] virtual std::byte* own_results() const = 0;

  // The number of the last dispatch; 0 before the first.
  [[nodiscard]] uint64_t call() const { return call_; }
  [[nodiscard]] bool is_topk() const { return config_.order == CombineOrder::kTopK; }
  // One row of H values that travels back.
  [[nodiscard]] int64_t result_row_bytes() const {
    return config_.hidden * bits(config_.result_dtype) / 8;
  }
  [[nodiscard]] int32_t num_places() const { return num_places_; }
  // Empty: expert e is at place e.
  [[nodiscard]] const std::vector<int32_t>& place_of_expert() const { return place_of_expert_; }
  [[nodiscard]] PayloadRows& payload() { return payload_; }
  [[nodiscard]] const PayloadRows& payload() const { return payload_; }

 private:
  enum class State : int { kIdle, kSent, kDispatched, kReturned };

  // Places in run()'s workspace for CombineOrder::kTopK; the layer's own one comes first.
  struct SlotRows {
    int64_t rows_offset = 0;
    int64_t map_offset = 0;
    int64_t bytes = 0;
  };

  // Why there are no tokens whose results combine() could send.
  [[nodiscard]] std::string why_idle() const;
  [[nodiscard]] SlotRows slot_rows(const MoeLayer& layer) const;
  // A step that throws ends the call on all ranks.
  template <class Step>
  void run_step(Stream stream, const Step& step);

  ExpertParallelConfig config_;
  ExpertLayout layout_;
  int rank_;
  Device device_;
  int32_t num_places_;
  std::vector<int32_t> place_of_expert_;
  PayloadRows payload_;
  int64_t tokens_ = 0;  // The tokens of the last dispatch.
  uint64_t call_ = 0;
  State state_ = State::kIdle;
  bool has_given_up_ = false;
};

}  // namespace narrowfloat
