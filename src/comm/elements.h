// The element types of an all-reduce on the host: a leaf as fp32 numbers and back. The kernels'
// counterpart with the same interface and results is ops/allreduce/sm90/leaf_elements.cuh.
//
//   kBytes
//   widen(leaf, x)         exact
//   narrow(x)              rounded to nearest even; NaN becomes the canonical NaN
//   round(x)               the value of narrow() as fp32
//   load(base, index)      leaf number `index` of a tensor
//   element(base, index)   one element
#pragma once

#include <cstring>

#include "comm/leaf.h"
#include "formats/float16.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat {

template <DType kType>
struct HostElements {
  static constexpr DType kDType = kType;
  static constexpr int kBytes = kType == DType::kF32 ? 4 : 2;
  using LeafType = Leaf<kBytes>;

  static float to_float(uint16_t bits) {
    return kType == DType::kBF16 ? bf16_to_float(bits) : f16_to_float(bits);
  }
  static uint16_t from_float(float x) {
    return kType == DType::kBF16 ? float_to_bf16(x) : float_to_f16(x);
  }

  static LeafType load(const void* base, int64_t index) {
    LeafType leaf;
    std::memcpy(&leaf, static_cast<const char*>(base) + index * int64_t{sizeof(leaf)},
                sizeof(leaf));
    return leaf;
  }
  static float element(const void* base, int64_t index) {
    if constexpr (kBytes == 4) {
      return static_cast<const float*>(base)[index];
    } else {
      return to_float(static_cast<const uint16_t*>(base)[index]);
    }
  }

  static float round(float x) {
    if constexpr (kBytes == 4) {
      return canonical_nan(x);
    } else {
      return to_float(from_float(x));
    }
  }
  static void widen(const LeafType& leaf, float (&x)[kLeafElements]) {
    for (int i = 0; i < kLeafElements; ++i) {
      if constexpr (kBytes == 4) {
        x[i] = bits_float(leaf.words[i]);
      } else {
        x[i] = to_float(static_cast<uint16_t>(leaf.words[i / 2] >> (i % 2 * 16)));
      }
    }
  }
  static LeafType narrow(const float (&x)[kLeafElements]) {
    LeafType leaf{};
    for (int i = 0; i < kLeafElements; ++i) {
      if constexpr (kBytes == 4) {
        leaf.words[i] = float_bits(canonical_nan(x[i]));
      } else {
        leaf.words[i / 2] |= static_cast<uint32_t>(from_float(x[i])) << (i % 2 * 16);
      }
    }
    return leaf;
  }
};

}  // namespace narrowfloat
