// Sizes of the buffers of a permutation, their places in one buffer, and the choice of the tile
// (moe spec 5.2, 5.3).
#include <algorithm>
#include <bit>
#include <limits>

#include "base/int_math.h"
#include "base/throw_error.h"
#include "ops/permute/permute_problem.h"

namespace narrowfloat {
namespace {

// Index tensors are I32 (moe spec 1.8).
constexpr int64_t kIndexLimit = int64_t{1} << 31;
constexpr int64_t kIndexBytes = sizeof(int32_t);

// tokens * slots.
int64_t count_slots(int64_t tokens, int64_t slots, int32_t local_experts) {
  if (tokens < 0) throw_invalid("tokens: expected >= 0, got {}", tokens);
  if (slots < 1) throw_invalid("slots: expected at least 1 per token, got {}", slots);
  if (local_experts < 1 || local_experts > kMaxLocalExperts) {
    throw_invalid("local_experts: expected 1 to {}, got {}", kMaxLocalExperts, local_experts);
  }
  const auto num_slots = checked_mul(tokens, slots);
  if (!num_slots || *num_slots >= kIndexLimit) {
    throw_invalid("tokens: {} tokens of {} slots make 2^31 slots or more; split the batch", tokens,
                  slots);
  }
  return *num_slots;
}

}  // namespace

PermutationLayout permutation_layout(int64_t tokens, int64_t slots, int32_t local_experts,
                                     int32_t token_tile) {
  const int64_t num_slots = count_slots(tokens, slots, local_experts);
  if (token_tile < 1 || !std::has_single_bit(static_cast<uint32_t>(token_tile))) {
    throw_invalid("token_tile: expected a power of two, got {}", token_tile);
  }
  // The worst case has one row on every expert and all other rows on one of them (moe spec 5.2).
  const int64_t occupied = std::min<int64_t>(local_experts, num_slots);
  const int64_t max_tiles = occupied + (num_slots - occupied) / token_tile;
  const int64_t max_rows = max_tiles * token_tile;
  if (max_rows >= kIndexLimit) {
    throw_invalid(
        "token_tile: {} slots of {} local experts in tiles of {} take up to {} rows; expected "
        "fewer than 2^31",
        num_slots, local_experts, token_tile, max_rows);
  }
  return {.tokens = tokens,
          .slots = slots,
          .local_experts = local_experts,
          .token_tile = token_tile,
          .max_tiles = max_tiles,
          .max_rows = max_rows,
          .bytes = (num_slots + 2 * max_rows + 2 * max_tiles + 2) * kIndexBytes};
}

Permutation PermutationLayout::bind(void* buffer, Device device) const {
  if (buffer == nullptr) throw_invalid("buffer: expected {} bytes, got null", bytes);
  const auto address = reinterpret_cast<uintptr_t>(buffer);
  if (address % kIndexBytes != 0) {
    throw_invalid("buffer: expected an address aligned to {} bytes, got {:#x}", kIndexBytes,
                  address);
  }
  auto* next = static_cast<int32_t*>(buffer);
  const auto take = [&](int64_t count) {
    int32_t* const first = next;
    next += count;
    return TensorView::contiguous(first, DType::kI32, {count}, device);
  };
  Permutation permutation;
  permutation.token_tile = token_tile;
  permutation.slot_to_row = take(tokens * slots);
  permutation.row_to_token = take(max_rows);
  permutation.row_to_slot = take(max_rows);
  permutation.num_rows = take(1);
  permutation.tile_to_expert = take(max_tiles);
  permutation.tile_row_end = take(max_tiles);
  permutation.num_tiles = take(1);
  return permutation;
}

int32_t default_token_tile(int64_t tokens, int64_t slots, int32_t local_experts) {
  constexpr int64_t kSmallest = 8;
  constexpr int64_t kLargest = 128;
  const int64_t mean = ceil_div(count_slots(tokens, slots, local_experts), local_experts);
  // True if tile >= mean + sqrt(2 * mean): then few experts need a second tile, which reads their
  // weights again.
  const auto is_enough = [&](int64_t tile) {
    return tile >= mean && (tile - mean) * (tile - mean) >= 2 * mean;
  };
  int64_t tile = kSmallest;
  while (tile < kLargest && !is_enough(tile)) tile *= 2;
  return static_cast<int32_t>(tile);
}

}  // namespace narrowfloat
