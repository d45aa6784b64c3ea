// RMSNorm with the same bits on every device and for any batch (spec 6.12).
//
// The sum of squares is one fixed binary tree over a row: leaf i is the fused multiply-add chain of
// elements 8i..8i+7, neighbours are added pairwise up to one value, absent leaves count as +0. Its
// shape depends on the row length only.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "base/float_ops.h"

namespace narrowfloat {

// Evaluates the tree while leaves arrive in order, with one partial sum per level: leaf number n
// completes the subtrees that end at n, like the carries of a binary counter.
class RmsNormSum {
 public:
  static constexpr size_t kLeaf = 8;

  // Adds the next elements of the row. Every call but the last has a multiple of 8 elements.
  void add(std::span<const float> elements) {
    for (size_t first = 0; first < elements.size(); first += kLeaf) {
      float leaf = 0.0F;
      for (size_t i = first; i < first + kLeaf && i < elements.size(); ++i) {
        leaf = fma_rn(elements[i], elements[i], leaf);
      }
      carry(leaf);
    }
  }

  // Adds the sum of a subtree instead of its leaves. All subtrees of a row have the same size, a
  // power of two; the last may lack leaves.
  void add_subtree(float sum) { carry(sum); }

  // Missing right partners are +0 and squares are >= +0, so adding them changes nothing: the
  // remaining subtrees are added up from the smallest one.
  [[nodiscard]] float total() const {
    float sum = 0.0F;
    for (size_t level = 0; level < kLevels; ++level) {
      if ((count_ >> level & 1U) != 0) sum = add_rn(partial_[level], sum);
    }
    return sum;
  }

 private:
  static constexpr size_t kLevels = 61;

  void carry(float sum) {
    size_t level = 0;
    for (; (count_ >> level & 1U) != 0; ++level) sum = add_rn(partial_[level], sum);
    partial_[level] = sum;
    ++count_;
  }

  uint64_t count_ = 0;
  std::array<float, kLevels> partial_{};
};

// cols: the number of columns, rounded to fp32.
NF_HOST_DEVICE inline float reciprocal_rms(float sum, float cols, float eps) {
  return rsqrt_rn(add_rn(div_rn(sum, cols), eps));
}
NF_HOST_DEVICE inline float reciprocal_rms_of_sum(float sum, int64_t cols, float eps) {
  return reciprocal_rms(sum, static_cast<float>(cols), eps);
}

// The normalised element before the rounding to 16 bits. The weight is added to +0, so that -0
// counts as +0.
NF_HOST_DEVICE inline float rms_norm_element(float x, float reciprocal_rms, float weight) {
  return mul_rn(mul_rn(x, reciprocal_rms), add_rn(0.0F, weight));
}

}  // namespace narrowfloat
