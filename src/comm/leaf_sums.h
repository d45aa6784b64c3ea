// The sums of an all-reduce over one leaf: over the ranks, and the local value of the MoE patterns
// (docs/allreduce.md, Exactness). Elements is HostElements or a counterpart for kernels.
#pragma once

#include "base/float_ops.h"
#include "comm/leaf.h"
#include "narrowfloat/allreduce.h"

namespace narrowfloat {

// A sum of leaves in a given order. kFp32: fp32 additions, rounded once by narrow(). kElement:
// rounded to the element type after every addition.
template <class Elements>
class LeafSum {
 public:
  using LeafType = typename Elements::LeafType;

  NF_HOST_DEVICE explicit LeafSum(AllReduceAccumulation accumulation)
      : rounds_(accumulation == AllReduceAccumulation::kElement) {}

  // Starts with a leaf.
  NF_HOST_DEVICE void start(const LeafType& leaf) { Elements::widen(leaf, sum_); }
  NF_HOST_DEVICE void add(const LeafType& leaf) {
    float x[kLeafElements];
    Elements::widen(leaf, x);
    for (int i = 0; i < kLeafElements; ++i) sum_[i] = rounded(add_rn(sum_[i], x[i]));
  }

  // Starts with +0.
  NF_HOST_DEVICE void start_with_zero() {
    for (float& s : sum_) s = 0.0F;
  }
  // Adds factor * leaf: fused, or the rounded product (kElement).
  NF_HOST_DEVICE void add_product(float factor, const LeafType& leaf) {
    float x[kLeafElements];
    Elements::widen(leaf, x);
    for (int i = 0; i < kLeafElements; ++i) {
      sum_[i] = rounds_ ? Elements::round(add_rn(sum_[i], Elements::round(mul_rn(factor, x[i]))))
                        : fma_rn(factor, x[i], sum_[i]);
    }
  }
  NF_HOST_DEVICE void scale(float factor) {
    for (float& s : sum_) s = rounded(mul_rn(s, factor));
  }

  [[nodiscard]] NF_HOST_DEVICE LeafType narrow() const { return Elements::narrow(sum_); }

 private:
  [[nodiscard]] NF_HOST_DEVICE float rounded(float x) const {
    return rounds_ ? Elements::round(x) : x;
  }

  bool rounds_;
  float sum_[kLeafElements];
};

// values[slot] = leaf for a slot that is known at run time, without indexing registers by it.
template <int kSlots, class LeafType>
NF_HOST_DEVICE void set_slot(LeafType (&values)[kSlots], int slot, const LeafType& leaf) {
  NF_UNROLL
  for (int i = 0; i < kSlots; ++i) {
    if (i == slot) values[i] = leaf;
  }
}

// The sum over the ranks, in their order.
template <int kMostRanks, class Elements>
NF_HOST_DEVICE typename Elements::LeafType sum_in_rank_order(
    const typename Elements::LeafType (&values)[kMostRanks], int ranks,
    AllReduceAccumulation accumulation) {
  LeafSum<Elements> sum(accumulation);
  sum.start(values[0]);
  NF_UNROLL
  for (int rank = 1; rank < kMostRanks; ++rank) {
    if (rank < ranks) sum.add(values[rank]);
  }
  return sum.narrow();
}

}  // namespace narrowfloat
