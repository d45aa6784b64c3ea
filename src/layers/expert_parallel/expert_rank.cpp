// See expert_rank.h. docs/parallel.md has the semantics.
#include "layers/expert_parallel/expert_rank.h"

#include <fmt/format.h>

#include "base/int_math.h"
#include "base/throw_error.h"
#include "narrowfloat/expert_placement.h"
#include "tensor/view_checks.h"

namespace narrowfloat {

ExpertParallel::Impl::Impl(const ExpertParallelConfig& config, const ExpertLayout& layout, int rank,
                           Device device)
    : config_(config),
      layout_(layout),
      rank_(rank),
      device_(device),
      num_places_(config.places.empty() ? config.experts
                                        : static_cast<int32_t>(config.places.size())),
      payload_(config.payload, config.max_tokens, config.hidden, device) {
  if (!config.places.empty()) {
    place_of_expert_ = narrowfloat::place_of_expert(config.places, config.experts, rank);
  }
}

// --- Failures ------------------------------------------------------------------------------------

void ExpertParallel::Impl::check() const {
  check_exchange();
  if (!has_given_up_) return;
  throw_error(ErrorKind::kDevice,
              "expert parallelism: call {} failed on rank {} of {}: this rank gave up; make a new "
              "ExpertParallel on all ranks, or end the job",
              call_, rank_, layout_.ranks);
}

void ExpertParallel::Impl::give_up(Stream stream) {
  has_given_up_ = true;
  tell_peers_to_give_up(stream);
}

void ExpertParallel::Impl::give_up_after_error(Stream stream) noexcept {
  try {
    give_up(stream);
  } catch (...) {
    // A GPU that has failed tells nobody: the others have their deadline.
  }
}

template <class Step>
void ExpertParallel::Impl::run_step(Stream stream, const Step& step) {
  try {
    step();
  } catch (...) {
    give_up_after_error(stream);
    throw;
  }
}

// --- Steps of a call -----------------------------------------------------------------------------

void ExpertParallel::Impl::check_dispatch(const CodedRows& rows, const TensorView& ids,
                                          const TensorView& weights) const {
  check();
  if (state_ != State::kIdle) {
    throw_invalid(
        "dispatch: the tokens of call {} wait for combine(); dispatches and combines "
        "alternate",
        call_);
  }
  const int64_t tokens = payload_.check(rows);
  if (tokens > config_.max_tokens) {
    throw_invalid("rows.values: expected at most max_tokens = {} tokens, got {}",
                  config_.max_tokens, tokens);
  }
  require_tensor("ids", ids, {DType::kI32}, {tokens, config_.top_k}, device_);
  require_tensor("weights", weights, {DType::kF32}, {tokens, config_.top_k}, device_);
}

void ExpertParallel::Impl::start_dispatch(const CodedRows& rows, const TensorView& ids,
                                          const TensorView& weights, Stream stream) {
  tokens_ = rows.values.shape[0];
  ++call_;  // Before the first step, so that an error of it names this call.
  run_step(stream, [&] { send_tokens(rows, ids, weights, stream); });
  state_ = State::kSent;
}

ReceivedTokens ExpertParallel::Impl::finish_dispatch(Stream stream) {
  check();
  if (state_ != State::kSent) {
    throw_invalid("finish_dispatch: expected a call after start_dispatch(); {}", why_idle());
  }
  run_step(stream, [&] { receive_tokens(stream); });
  const int64_t rows = layout_.max_rows();
  ReceivedTokens tokens;
  tokens.rows = payload_.views(received(ExpertPart::kValues), received(ExpertPart::kScales),
                               received(ExpertPart::kRowScale), rows);
  tokens.ids = TensorView::contiguous(received(ExpertPart::kIds), DType::kI32,
                                      {rows, config_.top_k}, device_);
  tokens.weights = TensorView::contiguous(received(ExpertPart::kWeights), DType::kF32,
                                          {rows, config_.top_k}, device_);
  tokens.counts =
      TensorView::contiguous(received(ExpertPart::kCounts), DType::kI32, {layout_.ranks}, device_);
  tokens.call = call_;
  state_ = State::kDispatched;
  return tokens;
}

std::string ExpertParallel::Impl::why_idle() const {
  switch (state_) {
    case State::kSent:
      return fmt::format("call {} waits for finish_dispatch()", call_);
    case State::kDispatched:
      return fmt::format("call {} was dispatched already", call_);
    case State::kReturned:
      return fmt::format("call {} waits for finish_combine()", call_);
    case State::kIdle:
      break;
  }
  return call_ == 0 ? "no dispatch() came before"
                    : fmt::format("call {} was combined already", call_);
}

TensorView ExpertParallel::Impl::results() const {
  check();
  if (state_ != State::kDispatched) {
    throw_invalid("results: expected a call between dispatch() and combine(); {}", why_idle());
  }
  const int64_t rows = layout_.max_rows();
  if (!is_topk()) {
    return TensorView::contiguous(own_results(), config_.result_dtype, {rows, config_.hidden},
                                  device_);
  }
  return TensorView::contiguous(own_results(), config_.result_dtype,
                                {rows, config_.top_k, config_.hidden}, device_);
}

void ExpertParallel::Impl::check_call(uint64_t call) const {
  check();
  if (state_ != State::kDispatched) {
    throw_invalid("received: expected what dispatch() returned, before its combine(); {}",
                  why_idle());
  }
  if (call != call_) {
    throw_invalid("received: expected what the last dispatch() returned (call {}), got call {}",
                  call_, call);
  }
}

void ExpertParallel::Impl::check_output(int64_t tokens, const TensorView& out) const {
  require_view("out", out);
  require_dtype("out", out, {DType::kBF16, DType::kF16, DType::kF32});
  require_device("out", out.device, device_);
  if (out.rank != 2 || out.shape[0] != tokens || out.shape[1] < 1 ||
      out.shape[1] > config_.hidden) {
    throw_invalid("out: expected [{}, N] with N from 1 to {}, got {}", tokens, config_.hidden,
                  narrowfloat::to_string(out));
  }
  static_cast<void>(require_rows("out", out, out.shape[1]));
  require_data("out", out);
  if (device_.type == DeviceType::kCpu) return;
  constexpr int64_t kPiece = 16;
  if (reinterpret_cast<uintptr_t>(out.data) % kPiece != 0 ||
      out.strides[0] * bits(out.dtype) / 8 % kPiece != 0) {
    throw_invalid(
        "out: expected rows at multiples of {} bytes on a GPU, got {} with rows {} "
        "elements apart",
        kPiece, fmt::ptr(out.data), out.strides[0]);
  }
}

void ExpertParallel::Impl::start_combine(Stream stream) {
  run_step(stream, [&] { send_results(stream); });
  state_ = State::kReturned;
}

void ExpertParallel::Impl::check_finish_combine(const TensorView& out) const {
  check();
  if (state_ != State::kReturned) {
    throw_invalid("finish_combine: expected a call after start_combine(); {}", why_idle());
  }
  check_output(tokens_, out);
}

void ExpertParallel::Impl::finish_combine(const TensorView& out, Stream stream) {
  state_ = State::kIdle;
  run_step(stream, [&] { sum_results(out, stream); });
}

// --- A layer on the received rows ----------------------------------------------------------------

void ExpertParallel::Impl::check_layer(const MoeLayer& layer, const TensorView& workspace) const {
  const MoeConfig& moe = layer.config();
  const ExpertShard own = shard();
  const auto expect = [](std::string_view what, int64_t expected, int64_t got) {
    if (expected != got) throw_invalid("layer: expected {} {}, got {}", what, expected, got);
  };
  expect("hidden", config_.hidden, moe.hidden);
  expect(config_.places.empty() ? "routing.experts" : "routing.experts (places)", num_places_,
         moe.routing.experts);
  expect("routing.top_k", config_.top_k, moe.routing.top_k);
  expect("routing.shared_experts", 0, moe.routing.shared_experts);
  expect("expert_offset", own.offset, moe.expert_offset);
  expect("local_experts", own.count, moe.local_experts);
  if (!moe.routing.options.negative_one_is_empty) {
    throw_invalid(
        "layer: expected RouterOptions::negative_one_is_empty, since rows that nobody sent have "
        "ids of -1");
  }
  const RowFormat input = moe_mode_info(moe.mode).input;
  if (config_.payload != RowFormat::kBf16 && config_.payload != input) {
    throw_invalid("layer: mode {} reads rows in {}, the payload is {}", name(moe.mode), name(input),
                  name(config_.payload));
  }
  const DType results = is_topk() ? moe.slot_dtype : moe.out_dtype;
  if (results != config_.result_dtype) {
    throw_invalid("layer: expected {} {} as result_dtype says, got {}",
                  is_topk() ? "slot_dtype" : "out_dtype", name(config_.result_dtype),
                  name(results));
  }
  if (is_topk() && moe.weight_on_input) {
    throw_invalid(
        "layer: weight_on_input puts weights into the rows; use order rank, which gives the same "
        "bytes where top_k is 1");
  }
  require_view("workspace", workspace);
  require_dtype("workspace", workspace, {DType::kU8});
  require_dense("workspace", workspace);
  require_device("workspace", workspace.device, device_);
  const int64_t required = required_workspace(layer);
  if (workspace.num_elements() < required ||
      reinterpret_cast<uintptr_t>(workspace.data) % kWorkspaceAlignment != 0) {
    throw_invalid("workspace: expected at least {} bytes at a multiple of {}, got {} at {}",
                  required, kWorkspaceAlignment, workspace.num_elements(),
                  fmt::ptr(workspace.data));
  }
  require_data("workspace", workspace);
}

ExpertParallel::Impl::SlotRows ExpertParallel::Impl::slot_rows(const MoeLayer& layer) const {
  const int64_t rows = layout_.max_rows();
  SlotRows parts;
  parts.rows_offset = round_up(layer.required_workspace(rows), kWorkspaceAlignment);
  if (!is_topk()) {
    parts.bytes = parts.rows_offset;
    return parts;
  }
  parts.map_offset =
      parts.rows_offset + round_up(layer.max_rows(rows) * result_row_bytes(), kWorkspaceAlignment);
  parts.bytes = parts.map_offset + rows * config_.top_k * static_cast<int64_t>(sizeof(int32_t));
  return parts;
}

int64_t ExpertParallel::Impl::required_workspace(const MoeLayer& layer) const {
  return slot_rows(layer).bytes;
}

void ExpertParallel::Impl::run_experts(const MoeLayer& layer, const ReceivedTokens& received,
                                       const TensorView& workspace, Stream stream) const {
  Routing routing;
  routing.ids = received.ids;
  routing.weights = received.weights;
  MoeOutputs outputs;
  if (!is_topk()) {
    outputs.out = results();
    return layer.run(received.rows, routing, outputs, workspace, stream);
  }
  const int64_t slots = layout_.max_rows() * config_.top_k;
  const SlotRows parts = slot_rows(layer);
  auto* const base = static_cast<std::byte*>(workspace.data);
  auto* const slot_to_row = reinterpret_cast<int32_t*>(base + parts.map_offset);
  const std::byte* const rows = base + parts.rows_offset;
  outputs.slot_out = TensorView::contiguous(
      rows, config_.result_dtype, {layer.max_rows(layout_.max_rows()), config_.hidden}, device_);
  outputs.slot_to_row = TensorView::contiguous(slot_to_row, DType::kI32, {slots}, device_);
  layer.run(received.rows, routing, outputs,
            TensorView::contiguous(base, DType::kU8, {parts.rows_offset}, device_), stream);
  store_slots(rows, slot_to_row, slots, stream);
}

}  // namespace narrowfloat
