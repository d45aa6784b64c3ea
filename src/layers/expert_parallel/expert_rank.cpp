// See expert_rank.h. The steps are those of allreduce spec 10.1, on the CPU.
#include "layers/expert_parallel/expert_rank.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "base/int_math.h"
#include "base/throw_error.h"
#include "narrowfloat/combine.h"
#include "narrowfloat/expert_placement.h"
#include "runtime/parallel.h"
#include "tensor/view_checks.h"

namespace narrowfloat {
namespace {

constexpr Device kCpu{};
// Bytes that a task copies.
constexpr int64_t kCopyGrain = 1 << 16;

}  // namespace

ExpertParallel::Impl::Impl(const ExpertParallelConfig& config, const ExpertLayout& layout, int rank,
                           std::unique_ptr<ExpertExchange> exchange)
    : config_(config),
      layout_(layout),
      rank_(rank),
      num_places_(config.places.empty() ? config.experts
                                        : static_cast<int32_t>(config.places.size())),
      exchange_(std::move(exchange)),
      payload_(config.payload, config.max_tokens, config.hidden) {
  const int64_t most_copies =
      config.order == CombineOrder::kTopK ? config.top_k : std::min(config.top_k, layout.ranks);
  if (!config.places.empty()) {
    place_of_expert_ = narrowfloat::place_of_expert(config.places, config.experts, rank);
  }
  returned_.resize(static_cast<size_t>(config.max_tokens * most_copies * result_row_bytes()));
}

void ExpertParallel::Impl::check_dispatch(const CodedRows& rows, const TensorView& ids,
                                          const TensorView& weights) const {
  exchange_->check();
  if (is_dispatched_) {
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
  require_tensor("ids", ids, {DType::kI32}, {tokens, config_.top_k}, kCpu);
  require_tensor("weights", weights, {DType::kF32}, {tokens, config_.top_k}, kCpu);
}

TensorView ExpertParallel::Impl::find_places(const TensorView& ids) {
  const std::span given(static_cast<const int32_t*>(ids.data),
                        static_cast<size_t>(ids.num_elements()));
  ids_.assign(given.begin(), given.end());
  for (int32_t& id : ids_) {
    if (id < 0 || id >= config_.experts) {
      id = -1;
    } else if (!place_of_expert_.empty()) {
      id = place_of_expert_[static_cast<size_t>(id)];
    }
  }
  return TensorView::contiguous(ids_.data(), DType::kI32, {ids.shape[0], config_.top_k});
}

void ExpertParallel::Impl::pack(const CodedRows& rows, const TensorView& ids,
                                const TensorView& weights) {
  struct Source {
    ExpertPart part;
    const std::byte* data;
    int64_t row_bytes;
  };
  std::vector<Source> sources;
  const auto add = [&](ExpertPart part, const void* data) {
    const int64_t row_bytes = layout_.place(part).row_bytes;
    if (row_bytes > 0) sources.push_back({part, static_cast<const std::byte*>(data), row_bytes});
  };
  add(ExpertPart::kValues, rows.values.data);
  add(ExpertPart::kScales, rows.scales.data);
  add(ExpertPart::kRowScale, rows.row_scale.data);
  add(ExpertPart::kIds, ids.data);
  add(ExpertPart::kWeights, weights.data);
  const int64_t grain = row_grain(kCopyGrain, layout_.place(ExpertPart::kValues).row_bytes);
  for (int rank = 0; rank < layout_.ranks; ++rank) {
    parallel_for(plan_.tokens, grain, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        const int32_t place = plan_.place(token, rank);
        if (place < 0) continue;
        for (const Source& source : sources) {
          std::memcpy(exchange_->outgoing(source.part, rank) + place * source.row_bytes,
                      source.data + token * source.row_bytes,
                      static_cast<size_t>(source.row_bytes));
        }
      }
    });
    std::memcpy(exchange_->outgoing(ExpertPart::kCounts, rank),
                &plan_.counts[static_cast<size_t>(rank)], sizeof(int32_t));
  }
}

// Ids of rows that nobody sent are -1, and so are those that name no expert.
ReceivedTokens ExpertParallel::Impl::finish_received() {
  auto* const counts = reinterpret_cast<int32_t*>(exchange_->received(ExpertPart::kCounts));
  auto* const ids = reinterpret_cast<int32_t*>(exchange_->received(ExpertPart::kIds));
  const int64_t k = config_.top_k;
  for (int source = 0; source < layout_.ranks; ++source) {
    if (counts[source] < 0 || counts[source] > config_.max_tokens) {
      exchange_->give_up();
      throw_error(ErrorKind::kDevice,
                  "expert parallelism: rank {} sent a count of {} tokens, of "
                  "at most {}",
                  source, counts[source], config_.max_tokens);
    }
    int32_t* const begin = ids + source * config_.max_tokens * k;
    int32_t* const sent = begin + counts[source] * k;
    std::replace_if(
        begin, sent, [&](int32_t id) { return id < 0 || id >= num_places_; }, -1);
    std::fill(sent, begin + config_.max_tokens * k, -1);
  }
  const int64_t rows = layout_.max_rows();
  ReceivedTokens received;
  received.rows = payload_.views(exchange_->received(ExpertPart::kValues),
                                 exchange_->received(ExpertPart::kScales),
                                 exchange_->received(ExpertPart::kRowScale), rows);
  received.ids = TensorView::contiguous(ids, DType::kI32, {rows, k});
  received.weights =
      TensorView::contiguous(exchange_->received(ExpertPart::kWeights), DType::kF32, {rows, k});
  received.counts = TensorView::contiguous(counts, DType::kI32, {layout_.ranks});
  received.call = call_;
  return received;
}

ReceivedTokens ExpertParallel::Impl::dispatch(const CodedRows& rows, const TensorView& ids,
                                              const TensorView& weights) {
  check_dispatch(rows, ids, weights);
  const TensorView places = find_places(ids);
  plan_ = plan_dispatch(places, num_places_, layout_.ranks);
  if (is_topk()) {
    const auto* const given = static_cast<const float*>(weights.data);
    weights_.assign(given, given + weights.num_elements());
  }
  pack(payload_.quantize(rows), places, weights);
  exchange_->exchange_tokens();
  ++call_;
  ReceivedTokens received = finish_received();
  is_dispatched_ = true;
  return received;
}

std::string ExpertParallel::Impl::why_idle() const {
  return call_ == 0 ? "no dispatch() came before"
                    : fmt::format("call {} was combined already", call_);
}

TensorView ExpertParallel::Impl::results() const {
  exchange_->check();
  if (!is_dispatched_) {
    throw_invalid("results: expected a call between dispatch() and combine(); {}", why_idle());
  }
  const int64_t rows = layout_.max_rows();
  if (!is_topk()) {
    return TensorView::contiguous(exchange_->results(), config_.result_dtype,
                                  {rows, config_.hidden});
  }
  return TensorView::contiguous(exchange_->results(), config_.result_dtype,
                                {rows, config_.top_k, config_.hidden});
}

void ExpertParallel::Impl::check_call(uint64_t call) const {
  exchange_->check();
  if (!is_dispatched_) {
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
  require_device("out", out.device, kCpu);
  if (out.rank != 2 || out.shape[0] != tokens || out.shape[1] < 1 ||
      out.shape[1] > config_.hidden) {
    throw_invalid("out: expected [{}, N] with N from 1 to {}, got {}", tokens, config_.hidden,
                  narrowfloat::to_string(out));
  }
  static_cast<void>(require_rows("out", out, out.shape[1]));
  require_data("out", out);
}

int64_t ExpertParallel::Impl::gather_returned(std::vector<int32_t>& slot_to_row) {
  const int64_t slots = is_topk() ? config_.top_k : layout_.ranks;
  const int64_t row_bytes = result_row_bytes();
  slot_to_row.assign(static_cast<size_t>(plan_.tokens * slots), -1);
  std::vector<const std::byte*> rows;  // Where each gathered row lies.
  for (int64_t token = 0; token < plan_.tokens; ++token) {
    for (int64_t slot = 0; slot < slots; ++slot) {
      const auto idx = static_cast<size_t>(token * slots + slot);
      if (is_topk() && ids_[idx] < 0) continue;
      const int rank = is_topk() ? rank_of_expert(num_places_, layout_.ranks, ids_[idx])
                                 : static_cast<int>(slot);
      const int32_t place = plan_.place(token, rank);
      if (place < 0) continue;
      const int64_t row = is_topk() ? place * slots + slot : place;
      slot_to_row[idx] = static_cast<int32_t>(rows.size());
      rows.push_back(exchange_->returned(rank) + row * row_bytes);
    }
  }
  const auto count = static_cast<int64_t>(rows.size());
  parallel_for(count, row_grain(kCopyGrain, row_bytes), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      std::memcpy(returned_.data() + row * row_bytes, rows[static_cast<size_t>(row)],
                  static_cast<size_t>(row_bytes));
    }
  });
  return count;
}

void ExpertParallel::Impl::combine(const TensorView& out) {
  is_dispatched_ = false;
  exchange_->exchange_results();
  std::vector<int32_t> slot_to_row;
  const int64_t rows = gather_returned(slot_to_row);
  if (plan_.tokens == 0) return;
  const TensorView gathered =
      TensorView::contiguous(returned_.data(), config_.result_dtype, {rows, config_.hidden});
  const auto slots = static_cast<int64_t>(slot_to_row.size());
  TensorView weights;
  if (is_topk()) {
    weights = TensorView::contiguous(weights_.data(), DType::kF32, {slots});
  }
  narrowfloat::combine(gathered, TensorView::contiguous(slot_to_row.data(), DType::kI32, {slots}),
                       weights, out);
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
  require_device("workspace", workspace.device, kCpu);
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
                                       const TensorView& workspace) const {
  Routing routing;
  routing.ids = received.ids;
  routing.weights = received.weights;
  MoeOutputs outputs;
  if (!is_topk()) {
    outputs.out = results();
    return layer.run(received.rows, routing, outputs, workspace);
  }
  const int64_t slots = layout_.max_rows() * config_.top_k;
  const SlotRows parts = slot_rows(layer);
  auto* const base = static_cast<std::byte*>(workspace.data);
  auto* const slot_to_row = reinterpret_cast<int32_t*>(base + parts.map_offset);
  const std::byte* const rows = base + parts.rows_offset;
  outputs.slot_out = TensorView::contiguous(rows, config_.result_dtype,
                                            {layer.max_rows(layout_.max_rows()), config_.hidden});
  outputs.slot_to_row = TensorView::contiguous(slot_to_row, DType::kI32, {slots});
  layer.run(received.rows, routing, outputs,
            TensorView::contiguous(base, DType::kU8, {parts.rows_offset}));
  const int64_t row_bytes = result_row_bytes();
  std::byte* const target = exchange_->results();
  parallel_for(slots, row_grain(kCopyGrain, row_bytes), [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot) {
      if (slot_to_row[slot] < 0) continue;
      std::memcpy(target + slot * row_bytes, rows + slot_to_row[slot] * row_bytes,
                  static_cast<size_t>(row_bytes));
    }
  });
}

}  // namespace narrowfloat
