// See expert_layout.h.
#include "layers/expert_parallel/expert_layout.h"

#include <limits>
#include <optional>

#include "base/int_math.h"
#include "base/throw_error.h"
#include "narrowfloat/expert_placement.h"
#include "tensor/row_format.h"

namespace narrowfloat {
namespace {

constexpr int64_t kLine = 128;
constexpr int64_t kMostBytes = int64_t{1} << 62;

[[noreturn]] void refuse_size() {
  throw_invalid("max_tokens, hidden, top_k: the memory of a rank exceeds 2^62 bytes");
}

void check_payload(const ExpertParallelConfig& config) {
  const RowFormat payload = config.payload;
  if (payload != RowFormat::kBf16 && payload != RowFormat::kFp8Group &&
      payload != RowFormat::kMxfp8 && payload != RowFormat::kNvfp4PerToken) {
    throw_invalid("payload: expected bf16, {}, {} or {}, got {}", name(RowFormat::kFp8Group),
                  name(RowFormat::kMxfp8), name(RowFormat::kNvfp4PerToken), name(payload));
  }
  const int64_t multiple = column_multiple(payload);
  if (config.hidden < 1 || config.hidden % multiple != 0) {
    throw_invalid("hidden: payload {} needs a positive multiple of {}, got {}", name(payload),
                  multiple, config.hidden);
  }
}

void check_config(const ExpertParallelConfig& config, int ranks) {
  if (ranks < 1) throw_invalid("ranks: expected 1 or more, got {}", ranks);
  if (!config.places.empty()) {
    check_places(config.places, config.experts, ranks);
  } else if (config.experts < ranks) {
    throw_invalid("experts: expected at least one for each of the {} ranks, got {}", ranks,
                  config.experts);
  }
  if (config.top_k < 1 || config.top_k > config.experts) {
    throw_invalid("top_k: expected 1 to {} (experts), got {}", config.experts, config.top_k);
  }
  if (config.max_tokens < 1) {
    throw_invalid("max_tokens: expected 1 or more, got {}", config.max_tokens);
  }
  check_payload(config);
  const DType dtype = config.result_dtype;
  const bool is_topk = config.order == CombineOrder::kTopK;
  static_cast<void>(name(config.order));  // Throws for an invalid order.
  if (dtype != DType::kBF16 && dtype != DType::kF32 && (is_topk || dtype != DType::kF16)) {
    throw_invalid("result_dtype: order {} needs {}, got {}", name(config.order),
                  is_topk ? "BF16 or F32" : "BF16, F16 or F32", name(dtype));
  }
}

// a * b * c bytes, refused where it is too much to be meant.
int64_t bytes_of(int64_t a, int64_t b, int64_t c) {
  const std::optional<int64_t> ab = checked_mul(a, b);
  const std::optional<int64_t> all = ab ? checked_mul(*ab, c) : std::nullopt;
  if (!all || *all > kMostBytes) refuse_size();
  return *all;
}

}  // namespace

int64_t result_slots(const ExpertParallelConfig& config) {
  return config.order == CombineOrder::kTopK ? config.top_k : 1;
}

ExpertLayout expert_layout(const ExpertParallelConfig& config, int ranks) {
  check_config(config, ranks);
  const std::optional<int64_t> rows = checked_mul(config.max_tokens, ranks);
  if (!rows || *rows > std::numeric_limits<int32_t>::max()) {
    throw_invalid("max_tokens: {} of each of {} ranks are more than 2^31 - 1 rows",
                  config.max_tokens, ranks);
  }
  // Slots of results have 32-bit numbers.
  if (bytes_of(*rows, result_slots(config), 1) > std::numeric_limits<int32_t>::max()) {
    throw_invalid("max_tokens, top_k: {} rows of {} slots are more than 2^31 - 1 slots", *rows,
                  config.top_k);
  }
  // Else the number of bits of a row would not fit into 64 bits.
  if (config.hidden > kMostBytes / 64) refuse_size();
  ExpertLayout layout;
  layout.ranks = ranks;
  layout.max_tokens = config.max_tokens;
  const int64_t flags = round_up(ranks * int64_t{4}, kLine);
  layout.token_flags = kLine;
  layout.result_flags = layout.token_flags + flags;
  int64_t end = layout.result_flags + flags;
  const auto add = [&](ExpertPart part, int64_t row_bytes, int64_t block_bytes) {
    layout.places[static_cast<size_t>(part)] = {
        .offset = end, .row_bytes = row_bytes, .block_bytes = block_bytes};
    const std::optional<int64_t> next =
        checked_add(end, round_up(bytes_of(block_bytes, ranks, 1), kLine));
    if (!next || *next > kMostBytes) refuse_size();
    end = *next;
  };
  const auto add_rows = [&](ExpertPart part, int64_t row_bytes) {
    add(part, row_bytes, bytes_of(row_bytes, config.max_tokens, 1));
  };
  const RowFormat payload = config.payload;
  add(ExpertPart::kCounts, 0, 4);
  add_rows(ExpertPart::kValues, row_bytes(payload, config.hidden));
  add_rows(ExpertPart::kScales,
           scale_blocks(payload, config.hidden) * bits(scale_dtype(payload)) / 8);
  add_rows(ExpertPart::kRowScale, payload == RowFormat::kNvfp4PerToken ? 4 : 0);
  add_rows(ExpertPart::kIds, int64_t{4} * config.top_k);
  add_rows(ExpertPart::kWeights, int64_t{4} * config.top_k);
  add_rows(ExpertPart::kResults,
           bytes_of(result_slots(config), config.hidden, bits(config.result_dtype) / 8));
  layout.size_bytes = end;
  return layout;
}

}  // namespace narrowfloat
