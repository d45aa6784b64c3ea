// Permutation: sorts the slots of all tokens by expert, each expert's rows padded to a multiple of
// the token tile (moe spec 5). The order within an expert is that of the slot indexes (stable).
//
//   Permutation member   FlashInfer's name
//   slot_to_row          expanded_idx_to_permuted_idx
//   row_to_token         permuted_idx_to_token_idx
//   row_to_slot          permuted_idx_to_expanded_idx
//   num_rows             total_num_padded_tokens
//   tile_to_expert       cta_idx_xy_to_batch_idx
//   tile_row_end         cta_idx_xy_to_mn_limit
//   num_tiles            num_non_exiting_ctas
#pragma once

#include <cstdint>

#include "narrowfloat/export.h"
#include "narrowfloat/moe_types.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat {

// Sizes of the buffers of a Permutation: bounds over all routings (moe spec 5.2).
struct PermutationLayout {
  int64_t tokens;
  int64_t slots;          // A token: k + S.
  int32_t local_experts;  // EL + S
  int32_t token_tile;
  int64_t max_tiles;
  int64_t max_rows;  // max_tiles * token_tile
  int64_t bytes;     // One buffer for everything.

  // Views into a buffer of `bytes` bytes, aligned to 4.
  [[nodiscard]] NARROWFLOAT_API Permutation bind(void* buffer, Device device = {}) const;
};

// Throws kInvalidArgument for extents out of range, and where slots or rows reach 2^31.
NARROWFLOAT_API PermutationLayout permutation_layout(int64_t tokens, int64_t slots,
                                                     int32_t local_experts, int32_t token_tile);

// The token tile that is used where the caller names none: the least power of two within [8, 128]
// that is at least m + sqrt(2 m), where m is the mean number of rows of a local expert, rounded up;
// 128 if none is. Never decreases as tokens grow.
NARROWFLOAT_API int32_t default_token_tile(int64_t tokens, int64_t slots, int32_t local_experts);

// ids: I32 [T, slots] of global experts. Ids in [expert_offset, expert_offset + local_experts) are
// local, the experts of `permutation`'s layout; others have no row. Throws before it writes.
NARROWFLOAT_API void permute(const TensorView& ids, int32_t expert_offset, int32_t local_experts,
                             const Permutation& permutation, Stream stream = {});

}  // namespace narrowfloat
