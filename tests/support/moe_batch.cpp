// See moe_batch.h.
#include "support/moe_batch.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/int_math.h"
#include "support/fills.h"

namespace narrowfloat::testing {
namespace {

using Bytes = std::vector<uint8_t>;

Bytes with_rows(const Bytes& bytes, size_t row_bytes, int64_t rows) {
  Bytes result(static_cast<size_t>(rows) * row_bytes);
  for (size_t at = 0; at < result.size();) {
    const size_t count = std::min(bytes.size(), result.size() - at);
    std::memcpy(&result[at], bytes.data(), count);
    at += count;
  }
  return result;
}

void expect_equal_rows(const char* what, const Bytes& bytes, int64_t tokens, int64_t period) {
  if (tokens <= period) return;
  const size_t row_bytes = bytes.size() / static_cast<size_t>(tokens);
  for (int64_t token = period; token < tokens; ++token) {
    const uint8_t* const row = &bytes[static_cast<size_t>(token) * row_bytes];
    const uint8_t* const same = &bytes[static_cast<size_t>(token % period) * row_bytes];
    ASSERT_EQ(std::memcmp(row, same, row_bytes), 0) << what << " of token " << token;
  }
}

}  // namespace

RepeatedTokens::RepeatedTokens(MoeCase& layer_case, int64_t tokens)
    : case_(layer_case), inputs_(layer_case.inputs()), routing_(layer_case.routing()) {
  TensorView& x = case_.inputs().values;
  x = repeat(x, tokens);
  Routing& routing = case_.routing();
  for (TensorView* view : {&routing.logits, &routing.packed, &routing.ids, &routing.weights}) {
    *view = repeat(*view, tokens);
  }
}

RepeatedTokens::~RepeatedTokens() {
  case_.inputs() = inputs_;
  case_.routing() = routing_;
}

TensorView RepeatedTokens::repeat(const TensorView& rows, int64_t tokens) {
  if (rows.is_absent()) return rows;
  const auto row_bytes = static_cast<size_t>(rows.shape[1] * bits(rows.dtype) / 8);
  const auto own = static_cast<size_t>(rows.shape[0]) * row_bytes;
  const auto* const data = static_cast<const uint8_t*>(rows.data);
  storage_.push_back(with_rows(Bytes(data, data + own), row_bytes, tokens));
  TensorView result = rows;
  result.data = storage_.back().data();
  result.shape[0] = tokens;
  return result;
}

MoeResult fp64_reference(const MoeCase& layer_case) {
  return layer_case.run_reference({.accumulation = Accumulation::kFp64});
}

std::vector<uint8_t> permuted_rows(const std::vector<uint8_t>& topk_ids, const MoeConfig& config,
                                   int32_t token_tile) {
  const auto* const ids = reinterpret_cast<const int32_t*>(topk_ids.data());
  const int32_t shared = config.routing.shared_experts;
  const auto num_local = static_cast<size_t>(config.local_experts + shared);
  std::vector<std::vector<size_t>> slots(num_local);
  const size_t count = topk_ids.size() / 4;
  for (size_t slot = 0; slot < count; ++slot) {
    const int64_t local = int64_t{ids[slot]} - config.expert_offset;
    if (local >= 0 && local < static_cast<int64_t>(num_local)) {
      slots[static_cast<size_t>(local)].push_back(slot);
    }
  }
  Bytes result(topk_ids.size(), 0xFF);
  auto* const rows = reinterpret_cast<int32_t*>(result.data());
  int64_t base = 0;
  for (const std::vector<size_t>& of_expert : slots) {
    for (size_t rank = 0; rank < of_expert.size(); ++rank) {
      rows[of_expert[rank]] = static_cast<int32_t>(base + static_cast<int64_t>(rank));
    }
    base += round_up(static_cast<int64_t>(of_expert.size()), token_tile);
  }
  return result;
}

MoeResult with_tokens(const MoeResult& result, const MoeLayer& layer, int64_t tokens) {
  const MoeConfig& config = layer.config();
  const auto slots = static_cast<size_t>(config.routing.top_k) +
                     static_cast<size_t>(config.routing.shared_experts);
  const auto row_bytes = [&](DType dtype) {
    return static_cast<size_t>(config.hidden * bits(dtype) / 8);
  };
  MoeResult other;
  other.out = with_rows(result.out, row_bytes(config.out_dtype), tokens);
  other.slot_rows = with_rows(result.slot_rows, slots * row_bytes(config.slot_dtype), tokens);
  other.expert_weights = with_rows(result.expert_weights, slots * 4, tokens);
  other.topk_ids = with_rows(result.topk_ids, slots * 4, tokens);
  other.slot_to_row = permuted_rows(other.topk_ids, config, layer.token_tile(tokens));
  return other;
}

std::vector<uint8_t> combined_slots(const MoeResult& result, const MoeConfig& config) {
  const std::vector<float> rows = as_floats(result.slot_rows, config.slot_dtype);
  const auto* const weights = reinterpret_cast<const float*>(result.expert_weights.data());
  const auto* const slot_to_row = reinterpret_cast<const int32_t*>(result.slot_to_row.data());
  const int64_t slots = config.routing.top_k + config.routing.shared_experts;
  const int64_t tokens = static_cast<int64_t>(result.slot_to_row.size() / 4) / slots;
  Bytes out(result.out.size());
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t col = 0; col < config.hidden; ++col) {
      float sum = 0;
      for (int64_t slot = token * slots; slot < (token + 1) * slots; ++slot) {
        if (slot_to_row[slot] < 0) continue;
        const float weight = config.weight_on_input ? 1.0F : weights[slot];
        sum = std::fma(weight, rows[static_cast<size_t>(slot * config.hidden + col)], sum);
      }
      store_element(config.out_dtype, element_bits(config.out_dtype, sum),
                    token * config.hidden + col, out.data());
    }
  }
  return out;
}

void expect_rows_of_shard(const MoeResult& part, const MoeResult& whole, int32_t offset,
                          int32_t count) {
  EXPECT_EQ(part.topk_ids, whole.topk_ids);
  EXPECT_EQ(part.expert_weights, whole.expert_weights);
  const auto* const rows = reinterpret_cast<const int32_t*>(part.slot_to_row.data());
  const auto* const ids = reinterpret_cast<const int32_t*>(whole.topk_ids.data());
  const size_t slots = part.slot_to_row.size() / 4;
  if (slots == 0) return;
  const size_t row_bytes = part.slot_rows.size() / slots;
  for (size_t slot = 0; slot < slots; ++slot) {
    const bool is_local = ids[slot] >= offset && ids[slot] < offset + count;
    ASSERT_EQ(rows[slot] >= 0, is_local) << "slot " << slot;
    if (!is_local) continue;
    ASSERT_EQ(std::memcmp(&part.slot_rows[slot * row_bytes], &whole.slot_rows[slot * row_bytes],
                          row_bytes),
              0)
        << "slot " << slot << ", expert " << ids[slot];
  }
}

void expect_periodic(const MoeResult& result, int64_t tokens, int64_t period) {
  expect_equal_rows("ids", result.topk_ids, tokens, period);
  expect_equal_rows("weights", result.expert_weights, tokens, period);
  expect_equal_rows("slot rows", result.slot_rows, tokens, period);
  expect_equal_rows("out", result.out, tokens, period);
}

}  // namespace narrowfloat::testing
