// See cpu_expert_rank.h.
#include "layers/expert_parallel/cpu_expert_rank.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/throw_error.h"
#include "narrowfloat/combine.h"
#include "runtime/parallel.h"

namespace narrowfloat {
namespace {

// Bytes that a task copies.
constexpr int64_t kCopyGrain = 1 << 16;

}  // namespace

CpuExpertRank::CpuExpertRank(const ExpertParallelConfig& config, const ExpertLayout& layout,
                             int rank, std::unique_ptr<ExpertExchange> exchange)
    : Impl(config, layout, rank, Device{}), exchange_(std::move(exchange)) {
  const int64_t most_copies = is_topk() ? config.top_k : std::min(config.top_k, layout.ranks);
  returned_.resize(static_cast<size_t>(config.max_tokens * most_copies * result_row_bytes()));
}

TensorView CpuExpertRank::find_places(const TensorView& ids) {
  const std::span given(static_cast<const int32_t*>(ids.data),
                        static_cast<size_t>(ids.num_elements()));
  ids_.assign(given.begin(), given.end());
  for (int32_t& id : ids_) {
    if (id < 0 || id >= config().experts) {
      id = -1;
    } else if (!place_of_expert().empty()) {
      id = place_of_expert()[static_cast<size_t>(id)];
    }
  }
  return TensorView::contiguous(ids_.data(), DType::kI32, {ids.shape[0], config().top_k});
}

void CpuExpertRank::pack(const CodedRows& rows, const TensorView& ids, const TensorView& weights) {
  struct Source {
    ExpertPart part;
    const std::byte* data;
    int64_t row_bytes;
  };
  std::vector<Source> sources;
  const auto add = [&](ExpertPart part, const void* data) {
    const int64_t row_bytes = layout().place(part).row_bytes;
    if (row_bytes > 0) sources.push_back({part, static_cast<const std::byte*>(data), row_bytes});
  };
  add(ExpertPart::kValues, rows.values.data);
  add(ExpertPart::kScales, rows.scales.data);
  add(ExpertPart::kRowScale, rows.row_scale.data);
  add(ExpertPart::kIds, ids.data);
  add(ExpertPart::kWeights, weights.data);
  const int64_t grain = row_grain(kCopyGrain, layout().place(ExpertPart::kValues).row_bytes);
  for (int rank = 0; rank < layout().ranks; ++rank) {
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

void CpuExpertRank::send_tokens(const CodedRows& rows, const TensorView& ids,
                                const TensorView& weights, Stream stream) {
  const TensorView places = find_places(ids);
  plan_ = plan_dispatch(places, num_places(), layout().ranks);
  if (is_topk()) {
    const auto* const given = static_cast<const float*>(weights.data);
    weights_.assign(given, given + weights.num_elements());
  }
  pack(payload().quantize(rows, stream), places, weights);
  exchange_->send_tokens();
}

// Ids of rows that nobody sent are -1, and so are those that name no expert.
void CpuExpertRank::receive_tokens(Stream /*stream*/) {
  exchange_->wait_for_tokens();
  auto* const counts = reinterpret_cast<int32_t*>(exchange_->received(ExpertPart::kCounts));
  auto* const ids = reinterpret_cast<int32_t*>(exchange_->received(ExpertPart::kIds));
  const int64_t k = config().top_k;
  const int64_t max_tokens = config().max_tokens;
  for (int source = 0; source < layout().ranks; ++source) {
    if (counts[source] < 0 || counts[source] > max_tokens) {
      throw_error(ErrorKind::kDevice,
                  "expert parallelism: rank {} sent a count of {} tokens, of "
                  "at most {}",
                  source, counts[source], max_tokens);
    }
    int32_t* const begin = ids + source * max_tokens * k;
    int32_t* const sent = begin + counts[source] * k;
    std::replace_if(
        begin, sent, [&](int32_t id) { return id < 0 || id >= num_places(); }, -1);
    std::fill(sent, begin + max_tokens * k, -1);
  }
}

int64_t CpuExpertRank::gather_returned(std::vector<int32_t>& slot_to_row) {
  const int64_t slots = is_topk() ? config().top_k : layout().ranks;
  const int64_t row_bytes = result_row_bytes();
  slot_to_row.assign(static_cast<size_t>(plan_.tokens * slots), -1);
  std::vector<const std::byte*> rows;  // Where each gathered row lies.
  for (int64_t token = 0; token < plan_.tokens; ++token) {
    for (int64_t slot = 0; slot < slots; ++slot) {
      const auto idx = static_cast<size_t>(token * slots + slot);
      if (is_topk() && ids_[idx] < 0) continue;
      const int rank = is_topk() ? rank_of_expert(num_places(), layout().ranks, ids_[idx])
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

void CpuExpertRank::sum_results(const TensorView& out, Stream /*stream*/) {
  exchange_->wait_for_results();
  std::vector<int32_t> slot_to_row;
  const int64_t rows = gather_returned(slot_to_row);
  if (plan_.tokens == 0) return;
  const TensorView gathered =
      TensorView::contiguous(returned_.data(), config().result_dtype, {rows, config().hidden});
  const auto slots = static_cast<int64_t>(slot_to_row.size());
  TensorView weights;
  if (is_topk()) {
    weights = TensorView::contiguous(weights_.data(), DType::kF32, {slots});
  }
  combine(gathered, TensorView::contiguous(slot_to_row.data(), DType::kI32, {slots}), weights, out);
}

void CpuExpertRank::store_slots(const std::byte* rows, const int32_t* slot_to_row, int64_t slots,
                                Stream /*stream*/) const {
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
