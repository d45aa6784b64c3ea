// A leaf: 8 neighbouring elements of a row, the unit in which rows are exchanged and summed
// (docs/allreduce.md, Exactness), as it lies in memory. 16 bytes of fp16 or bf16, 32 of fp32.
//
// In peer memory an addend that has not arrived is -0, the sentinel. Addends have no -0:
// without_negative_zeros() makes them +0 before they are sent. A sum may be -0, by underflow; one
// that has not arrived is a NaN with all bits set, which narrow() never makes.
#pragma once

#include <cstdint>

#include "base/float_ops.h"
#include "base/host_device.h"

namespace narrowfloat {

inline constexpr int kLeafElements = 8;

template <int kElementBytes>
struct alignas(16) Leaf {
  static_assert(kElementBytes == 2 || kElementBytes == 4);
  static constexpr int kWords = kLeafElements * kElementBytes / 4;

  uint32_t words[kWords];
};

using Leaf16 = Leaf<2>;
using Leaf32 = Leaf<4>;

namespace leaf_detail {

// The sign bits of the elements of a word that are -0.
template <int kElementBytes>
NF_HOST_DEVICE constexpr uint32_t negative_zeros(uint32_t word) {
  if constexpr (kElementBytes == 4) {
    return word == 0x80000000U ? 0x80000000U : 0U;
  } else {
    // x is zero in the halves in question; adding 0x7FFF to the other bits sets the sign of all
    // others.
    const uint32_t x = word ^ 0x80008000U;
    return ~(((x & 0x7FFF7FFFU) + 0x7FFF7FFFU) | x | 0x7FFF7FFFU);
  }
}

}  // namespace leaf_detail

template <int kElementBytes>
NF_HOST_DEVICE constexpr Leaf<kElementBytes> without_negative_zeros(Leaf<kElementBytes> leaf) {
  for (uint32_t& word : leaf.words) word ^= leaf_detail::negative_zeros<kElementBytes>(word);
  return leaf;
}

// Whether any element is the sentinel.
template <int kElementBytes>
NF_HOST_DEVICE constexpr bool has_sentinel(const Leaf<kElementBytes>& leaf) {
  uint32_t found = 0;
  for (const uint32_t word : leaf.words) {
    found |= leaf_detail::negative_zeros<kElementBytes>(word);
  }
  return found != 0;
}

// Four bytes of sentinels.
template <int kElementBytes>
NF_HOST_DEVICE constexpr uint32_t sentinel_word() {
  return kElementBytes == 4 ? 0x80000000U : 0x80008000U;
}

// The contents of a cleared cell.
template <int kElementBytes>
NF_HOST_DEVICE constexpr Leaf<kElementBytes> leaf_of_sentinels() {
  Leaf<kElementBytes> leaf{};
  for (uint32_t& word : leaf.words) word = sentinel_word<kElementBytes>();
  return leaf;
}

inline constexpr uint32_t kWordWithoutSums = 0xFFFFFFFFU;

// The contents of a cell that waits for sums.
template <int kElementBytes>
NF_HOST_DEVICE constexpr Leaf<kElementBytes> leaf_without_sums() {
  Leaf<kElementBytes> leaf{};
  for (uint32_t& word : leaf.words) word = kWordWithoutSums;
  return leaf;
}

// Whether any sum has not arrived.
template <int kElementBytes>
NF_HOST_DEVICE constexpr bool lacks_sum(Leaf<kElementBytes> leaf) {
  // Turns the NaN into the sentinel.
  for (uint32_t& word : leaf.words) word ^= kWordWithoutSums ^ sentinel_word<kElementBytes>();
  return has_sentinel(leaf);
}

}  // namespace narrowfloat
