// One golden case through the operations of a MoE layer, stage by stage.
#pragma once

#include "golden/moe_golden_case.h"

namespace narrowfloat::testing {

// The buffers of a permutation, full of 0xCC bytes.
struct OwnedPermutation {
  int32_t token_tile = 0;
  OwnedTensor slot_to_row;
  OwnedTensor row_to_token;
  OwnedTensor row_to_slot;
  OwnedTensor num_rows;
  OwnedTensor tile_to_expert;
  OwnedTensor tile_row_end;
  OwnedTensor num_tiles;

  OwnedPermutation() = default;
  explicit OwnedPermutation(const PermutationLayout& layout);
  [[nodiscard]] Permutation view() const;
  [[nodiscard]] std::vector<int64_t> local_rows() const;  // Rows of the local slots.
};

// Outputs start out as 0xFF bytes.
class MoeStages {
 public:
  MoeStages(const MoeGoldenCase& given, Accumulation accumulation);

  void route_tokens();
  void permute_slots();  // Permutes the ids of route_tokens().
  void multiply_first();
  void activate_rows();  // Activates the rows of multiply_first().
  // FC2 of the golden intermediate, and combine of the golden rows and weights.
  void multiply_second();
  void combine_slots();

  [[nodiscard]] int64_t tokens() const { return tokens_; }
  [[nodiscard]] int64_t slots() const { return slots_; }

  // Results. Those of rows are gathered: the local slots in the order of slot indexes.
  OwnedTensor ids;
  OwnedTensor weights;
  OwnedPermutation maps;
  OwnedTensor fc1;
  OwnedTensor h;
  OwnedTensor h_scales;
  OwnedTensor h_row_scale;
  OwnedTensor y;
  OwnedTensor out;

 private:
  [[nodiscard]] std::vector<int64_t> slots_of_rows() const;
  void multiply(GroupedGemmArgs args, const GroupedWeights& weights_of) const;

  const MoeGoldenCase& given_;
  MoeConfig config_;
  Accumulation accumulation_;
  int64_t tokens_;
  int64_t slots_;
  int64_t max_rows_ = 0;
  OwnedTensor fc1_rows_;
};

// A workspace of some bytes, aligned as the library wants it, full of 0xFF.
class AlignedBytes {
 public:
  explicit AlignedBytes(int64_t size);
  [[nodiscard]] TensorView view() const;

 private:
  int64_t size_;
  std::vector<uint8_t> bytes_;
};

}  // namespace narrowfloat::testing
