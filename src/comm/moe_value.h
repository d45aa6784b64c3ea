// The local addend of the MoE patterns for one leaf. Pointers are those
// of a rank's arguments; a tensor that is not there is null.
#pragma once

#include "comm/leaf_sums.h"

namespace narrowfloat {

struct MoeReductionArgs {
  const void* expert_rows = nullptr;     // E [experts, tokens, hidden]
  const float* expert_scales = nullptr;  // [experts, tokens]
  const int32_t* num_experts = nullptr;  // Or null: all `experts`.
  const void* token_input = nullptr;     // E [tokens, hidden]
  int32_t experts = 0;
};

struct MoeFinalizeArgs {
  const void* permuted_rows = nullptr;   // E [rows, hidden]
  const int32_t* slot_to_row = nullptr;  // [tokens, top_k]
  const void* slot_weights = nullptr;    // fp32 or E [tokens, top_k], or null.
  const void* shared_expert = nullptr;   // E [tokens, hidden], or null.
  int64_t rows = 0;
  int32_t top_k = 0;
  bool has_fp32_weights = true;
  float routed_scaling = 1.0F;
};

// Elements::load(base, index): the leaf `index` of a tensor; Elements::element(base, index): one
// element as fp32.
template <class Elements>
NF_HOST_DEVICE typename Elements::LeafType moe_reduction_value(const MoeReductionArgs& args,
                                                               AllReduceAccumulation accumulation,
                                                               int64_t tokens, int64_t token,
                                                               int64_t leaves, int64_t leaf) {
  int32_t experts = args.experts;
  if (args.num_experts != nullptr) {
    const int32_t active = *args.num_experts;
    experts = active < 0 ? 0 : active < experts ? active : experts;
  }
  LeafSum<Elements> sum(accumulation);
  sum.start_with_zero();
  for (int64_t x = 0; x < experts; ++x) {
    const int64_t row = x * tokens + token;
    sum.add_product(args.expert_scales[row], Elements::load(args.expert_rows, row * leaves + leaf));
  }
  sum.add(Elements::load(args.token_input, token * leaves + leaf));
  return sum.narrow();
}

// bad_index(row) is called for a row that does not exist, which counts as -1.
template <class Elements, class BadIndex>
NF_HOST_DEVICE typename Elements::LeafType moe_finalize_value(const MoeFinalizeArgs& args,
                                                              AllReduceAccumulation accumulation,
                                                              int64_t token, int64_t leaves,
                                                              int64_t leaf, BadIndex&& bad_index) {
  LeafSum<Elements> sum(accumulation);
  sum.start_with_zero();
  for (int32_t k = 0; k < args.top_k; ++k) {
    const int64_t slot = token * args.top_k + k;
    const int32_t row = args.slot_to_row[slot];
    if (row < -1 || row >= args.rows) bad_index(row);
    if (row < 0 || row >= args.rows) continue;
    float weight = 1.0F;
    if (args.slot_weights != nullptr) {
      weight = args.has_fp32_weights ? static_cast<const float*>(args.slot_weights)[slot]
                                     : Elements::element(args.slot_weights, slot);
    }
    sum.add_product(weight, Elements::load(args.permuted_rows, row * leaves + leaf));
  }
  if (args.routed_scaling != 1.0F) sum.scale(args.routed_scaling);
  if (args.shared_expert != nullptr) {
    sum.add(Elements::load(args.shared_expert, token * leaves + leaf));
  }
  return sum.narrow();
}

}  // namespace narrowfloat
