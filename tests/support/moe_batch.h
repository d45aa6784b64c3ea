// Batches of other sizes than a MoeCase has, and what one result says about another: so that a few
// tokens on the CPU judge many on a GPU.
#pragma once

#include <cstdint>
#include <vector>

#include "support/moe_case.h"

namespace narrowfloat::testing {

// While it lives, the case has `tokens` tokens: its own ones, over and over. A prime number of own
// tokens lets every one of them meet every place in a tile.
class RepeatedTokens {
 public:
  RepeatedTokens(MoeCase& layer_case, int64_t tokens);
  ~RepeatedTokens();
  RepeatedTokens(const RepeatedTokens&) = delete;
  RepeatedTokens& operator=(const RepeatedTokens&) = delete;

 private:
  TensorView repeat(const TensorView& rows, int64_t tokens);

  MoeCase& case_;
  MoeInputs inputs_;
  Routing routing_;
  std::vector<std::vector<uint8_t>> storage_;
};

// The case on the CPU in double precision.
MoeResult fp64_reference(const MoeCase& layer_case);

// Rows of slots with these ids: experts in order, padded to whole tiles, slots in order (moe
// spec 5.1).
std::vector<uint8_t> permuted_rows(const std::vector<uint8_t>& topk_ids, const MoeConfig& config,
                                   int32_t token_tile);

// The result of a run of the first `tokens` tokens of `result`, which is repeated if they are more.
MoeResult with_tokens(const MoeResult& result, const MoeLayer& layer, int64_t tokens);

// Rows of `out` from the result's own slots and weights: moe spec 6.6 to the bit. Equal to `out`
// for finite values.
std::vector<uint8_t> combined_slots(const MoeResult& result, const MoeConfig& config);

// `part` is a run of the experts [offset, offset + count) of `whole`, in tiles of the same size:
// their slots have equal rows to the bit, all others none.
void expect_rows_of_shard(const MoeResult& part, const MoeResult& whole, int32_t offset,
                          int32_t count);

// Each element of `result` belongs to a token, and tokens that are a multiple of `period` apart
// have equal ones to the bit; slot_to_row aside.
void expect_periodic(const MoeResult& result, int64_t tokens, int64_t period);

}  // namespace narrowfloat::testing
