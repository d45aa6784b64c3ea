// The element types of an all-reduce in kernels: the interface and results of comm/elements.h.
#pragma once

#include "comm/leaf.h"
#include "device/elements.cuh"

namespace narrowfloat {

template <class HalfType>
struct HalfLeafElements {
  using Half = HalfType;
  using LeafType = Leaf16;
  template <int kCount>
  using Registers = PackedElements<Half, kCount>;
  static constexpr DType kDType = Half::kDType;
  static constexpr int kBytes = 2;

  __device__ static LeafType load(const void* base, int64_t index) {
    const auto words = load_readonly<uint4>(static_cast<const uint4*>(base) + index);
    return {{words.x, words.y, words.z, words.w}};
  }
  __device__ static float element(const void* base, int64_t index) {
    return Half::low(static_cast<const uint16_t*>(base)[index]);
  }
  __device__ static float round(float x) { return Half::low(Half::pack(x, 0.0F)); }
  __device__ static void widen(const LeafType& leaf, float (&x)[kLeafElements]) {
    NF_UNROLL
    for (int i = 0; i < LeafType::kWords; ++i) {
      x[2 * i] = Half::low(leaf.words[i]);
      x[2 * i + 1] = Half::high(leaf.words[i]);
    }
  }
  __device__ static LeafType narrow(const float (&x)[kLeafElements]) {
    LeafType leaf;
    NF_UNROLL
    for (int i = 0; i < LeafType::kWords; ++i) leaf.words[i] = Half::pack(x[2 * i], x[2 * i + 1]);
    return leaf;
  }
};

struct FloatLeafElements {
  using LeafType = Leaf32;
  template <int kCount>
  using Registers = FloatElements<kCount>;
  static constexpr DType kDType = DType::kF32;
  static constexpr int kBytes = 4;

  __device__ static LeafType load(const void* base, int64_t index) {
    const auto* const address = static_cast<const uint4*>(base) + 2 * index;
    const auto low = load_readonly<uint4>(address);
    const auto high = load_readonly<uint4>(address + 1);
    return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
  }
  __device__ static float element(const void* base, int64_t index) {
    return static_cast<const float*>(base)[index];
  }
  __device__ static float round(float x) { return canonical_nan(x); }
  __device__ static void widen(const LeafType& leaf, float (&x)[kLeafElements]) {
    NF_UNROLL
    for (int i = 0; i < kLeafElements; ++i) x[i] = bits_float(leaf.words[i]);
  }
  __device__ static LeafType narrow(const float (&x)[kLeafElements]) {
    LeafType leaf;
    NF_UNROLL
    for (int i = 0; i < kLeafElements; ++i) leaf.words[i] = float_bits(canonical_nan(x[i]));
    return leaf;
  }
};

template <class LeafType>
__device__ inline void store_leaf(void* base, int64_t index, const LeafType& leaf) {
  auto* const address = static_cast<uint4*>(base) + index * (LeafType::kWords / 4);
  NF_UNROLL
  for (int i = 0; i < LeafType::kWords / 4; ++i) {
    address[i] = {leaf.words[4 * i], leaf.words[4 * i + 1], leaf.words[4 * i + 2],
                  leaf.words[4 * i + 3]};
  }
}

}  // namespace narrowfloat
