// See expert_case.h.
#include "unit/layers/expert_parallel/expert_case.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "narrowfloat/expert_placement.h"
#include "tensor/element_io.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kHidden = 128;
constexpr int64_t kInter = 128;

int64_t sum(const std::vector<int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

MoeShape shape_of(const ExpertSetup& setup) {
  return {.tokens = sum(setup.tokens),
          .hidden = kHidden,
          .inter = kInter,
          .experts = setup.experts,
          .top_k = setup.top_k};
}

}  // namespace

AlignedBytes::AlignedBytes(int64_t size) {
  constexpr int64_t kAlignment = 256;
  storage_.assign(static_cast<size_t>(size + kAlignment), 0xFF);
  const auto address = reinterpret_cast<uintptr_t>(storage_.data());
  view_ = TensorView::contiguous(
      storage_.data() + (kAlignment - static_cast<int64_t>(address % kAlignment)) % kAlignment,
      DType::kU8, {size});
}

ExpertCase::ExpertCase(const ExpertSetup& setup, uint64_t seed)
    : setup_(setup), whole_(setup.mode, shape_of(setup), {.kind = ActivationKind::kSwiglu}, seed) {
  Random random(seed + 1);
  draw_ids(random);
  weights_.resize(ids_.size());
  for (float& weight : weights_) weight = std::abs(random.normal());
  MoeConfig& config = whole_.config();
  config.routing.options.negative_one_is_empty = true;
  config.out_dtype = setup.out_dtype;
  if (setup.order == CombineOrder::kTopK) config.slot_dtype = setup.result_dtype;
  const int64_t tokens = sum(setup.tokens);
  if (!setup.places.empty()) place_experts();
  // Order topk gives the bytes of the whole layer, which has no places.
  const bool has_places = !setup.places.empty() && setup.order == CombineOrder::kRank;
  whole_.routing() = {};
  whole_.routing().ids = TensorView::contiguous(has_places ? placed_ids_.data() : valid_ids_.data(),
                                                DType::kI32, {tokens, setup.top_k});
  whole_.routing().weights =
      TensorView::contiguous(weights_.data(), DType::kF32, {tokens, setup.top_k});
}

void ExpertCase::draw_ids(Random& random) {
  const int32_t experts = setup_.experts;
  const ExpertShard last = expert_shard(experts, setup_.ranks, setup_.ranks - 1);
  ids_.resize(static_cast<size_t>(sum(setup_.tokens) * setup_.top_k));
  for (int32_t& id : ids_) {
    id = static_cast<int32_t>(random.range(0, experts - 1));
    switch (setup_.ids) {
      case IdsPattern::kUniform:
        break;
      case IdsPattern::kZipf:
        while (id > 0 && random.chance(60)) id /= 2;
        break;
      case IdsPattern::kOneRank:
        id = last.offset + id % last.count;
        break;
      case IdsPattern::kDuplicates:
        if (&id != ids_.data() && random.chance(50)) id = *(&id - 1);
        break;
      case IdsPattern::kWithInvalid:
        if (random.chance(40)) id = random.pick({-1, experts, experts + 7, -5, 1 << 30});
        break;
    }
  }
  valid_ids_ = ids_;
  std::replace_if(
      valid_ids_.begin(), valid_ids_.end(), [&](int32_t id) { return id < 0 || id >= experts; },
      -1);
}

int32_t ExpertCase::num_places() const {
  return setup_.places.empty() ? setup_.experts : static_cast<int32_t>(setup_.places.size());
}

void ExpertCase::place_experts() {
  const std::vector<int32_t>& places = setup_.places;
  for (int rank = 0; rank < setup_.ranks; ++rank) {
    const ExpertShard shard = expert_shard(num_places(), setup_.ranks, rank);
    std::vector<int32_t> experts(places.begin() + shard.offset,
                                 places.begin() + shard.offset + shard.count);
    experts.resize(static_cast<size_t>(setup_.experts), 0);
    placed_.push_back(std::make_unique<MovedWeights>(whole_.weights()));
    placed_.back()->rename_experts(experts);
    const std::vector<int32_t> place_of = place_of_expert(places, setup_.experts, rank);
    const int64_t first = first_token(rank) * setup_.top_k;
    for (int64_t slot = first; slot < first + tokens(rank) * setup_.top_k; ++slot) {
      const int32_t id = valid_ids_[static_cast<size_t>(slot)];
      placed_ids_.push_back(id < 0 ? -1 : place_of[static_cast<size_t>(id)]);
    }
  }
}

ExpertParallelConfig ExpertCase::config() const {
  return {.hidden = kHidden,
          .experts = setup_.experts,
          .top_k = setup_.top_k,
          .max_tokens = setup_.max_tokens,
          .places = setup_.places,
          .payload = setup_.payload,
          .order = setup_.order,
          .result_dtype = setup_.result_dtype};
}

MoeLayer ExpertCase::layer(int rank) const {
  const ExpertShard shard = expert_shard(num_places(), setup_.ranks, rank);
  MoeConfig config = whole_.config();
  config.routing.experts = num_places();
  config.expert_offset = shard.offset;
  config.local_experts = shard.count;
  if (setup_.order == CombineOrder::kRank) config.out_dtype = setup_.result_dtype;
  if (placed_.empty()) return MoeLayer::prepare(whole_.shard(shard.offset, shard.count), config);
  MovedWeights& placed = *placed_[static_cast<size_t>(rank)];
  return MoeLayer::prepare(expert_range(placed.weights(), 0, shard.count), config);
}

int64_t ExpertCase::tokens(int rank) const { return setup_.tokens[static_cast<size_t>(rank)]; }

int64_t ExpertCase::first_token(int rank) const {
  return std::accumulate(setup_.tokens.begin(), setup_.tokens.begin() + rank, int64_t{0});
}

CodedRows ExpertCase::rows(int rank) const {
  CodedRows rows;
  auto& x = const_cast<ExpertCase*>(this)->whole_.x();
  rows.values = TensorView::contiguous(x.data() + first_token(rank) * kHidden, DType::kBF16,
                                       {tokens(rank), kHidden});
  return rows;
}

TensorView ExpertCase::slots_of(const void* data, DType dtype, int rank) const {
  const int64_t first = first_token(rank) * setup_.top_k;
  return TensorView::contiguous(static_cast<const uint8_t*>(data) + first * 4, dtype,
                                {tokens(rank), setup_.top_k});
}
TensorView ExpertCase::ids(int rank) const { return slots_of(ids_.data(), DType::kI32, rank); }
TensorView ExpertCase::weights(int rank) const {
  return slots_of(weights_.data(), DType::kF32, rank);
}

std::vector<uint8_t> ExpertCase::expected(int rank) const {
  const auto element = static_cast<size_t>(bits(setup_.out_dtype) / 8);
  const auto begin = static_cast<size_t>(first_token(rank) * kHidden);
  const auto count = static_cast<size_t>(tokens(rank) * kHidden);
  if (setup_.order == CombineOrder::kTopK) {
    const std::vector<uint8_t> all = whole_.run().out;
    return {all.begin() + static_cast<std::ptrdiff_t>(begin * element),
            all.begin() + static_cast<std::ptrdiff_t>((begin + count) * element)};
  }
  // Each rank's own sum, rounded to the type of results; then ranks ascending in fp32.
  std::vector<float> total(count, 0.0F);
  for (int source = 0; source < setup_.ranks; ++source) {
    const std::vector<float> part = as_floats(whole_.run(layer(source)).out, setup_.result_dtype);
    for (size_t i = 0; i < count; ++i) total[i] += part[begin + i];
  }
  std::vector<uint8_t> bytes(count * element);
  narrow(setup_.out_dtype, total.data(), static_cast<int64_t>(count), bytes.data());
  return bytes;
}

std::vector<uint8_t> ExpertCase::run(ExpertParallel& group, int calls) const {
  const int rank = group.rank();
  const MoeLayer own = layer(rank);
  const AlignedBytes workspace(group.required_workspace(own));
  std::vector<uint8_t> out;
  for (int call = 0; call < calls; ++call) {
    out.assign(static_cast<size_t>(tokens(rank) * kHidden * bits(setup_.out_dtype) / 8), 0xFF);
    group.run(own, rows(rank), ids(rank), weights(rank),
              TensorView::contiguous(out.data(), setup_.out_dtype, {tokens(rank), kHidden}),
              workspace.view());
  }
  return out;
}

}  // namespace narrowfloat::testing
