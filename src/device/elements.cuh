// A thread's run of input elements in registers, as they are stored: pairs of bf16 or fp16 in
// words, or fp32 numbers. Kernels read a run's elements as fp32, its largest magnitude and its
// signs.
//
// Magnitudes are returned as fp32 bit patterns, whose order as integers is that of the numbers,
// with NaN above infinity:
//   max_or_nan()   NaN if any element is NaN
//   max_number()   the largest magnitude that is a number; NaN if there is none
#pragma once

#include "base/float_ops.h"
#include "device/packed16.cuh"
#include "device/vector_io.cuh"

namespace narrowfloat {

inline constexpr uint32_t kInfinityBits = 0x7F800000U;
inline constexpr uint32_t kNanBits = 0x7FFFFFFFU;

// kCount elements of a 16-bit type; element 2i in the lower half of word i.
template <class HalfType, int kCount>
struct PackedElements {
  using Half = HalfType;
  static constexpr int kSize = kCount;
  static constexpr int kWords = kCount / 2;
  static constexpr bool kIsPacked = true;
  static constexpr int kBytes = 2 * kCount;

  uint32_t words[kWords];

  __device__ float operator[](int i) const {
    return i % 2 == 0 ? Half::low(words[i / 2]) : Half::high(words[i / 2]);
  }
  __device__ uint32_t max_or_nan() const {
    return largest([](uint32_t a, uint32_t b) { return Half::max_or_nan(a, b); });
  }
  __device__ uint32_t max_number() const {
    return largest([](uint32_t a, uint32_t b) { return Half::max_number(a, b); });
  }

 private:
  template <class Larger>
  __device__ uint32_t largest(Larger&& larger) const {
    uint32_t parts[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) parts[i] = words[i];
#pragma unroll
    for (int count = kWords / 2; count > 0; count /= 2) {
#pragma unroll
      for (int i = 0; i < count; ++i) parts[i] = larger(parts[i], parts[i + count]);
    }
    return float_bits(fabsf(Half::low(larger(parts[0], parts[0] >> 16))));
  }
};

// An array of kCount fp32 elements.
template <int kCount>
struct FloatElements {
  static constexpr int kSize = kCount;
  static constexpr int kWords = kCount;
  static constexpr bool kIsPacked = false;
  static constexpr int kBytes = 4 * kCount;

  uint32_t words[kWords];

  __device__ float operator[](int i) const { return bits_float(words[i]); }
  __device__ uint32_t max_or_nan() const {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) largest = max(largest, words[i] & 0x7FFFFFFFU);
    return largest;
  }
  __device__ uint32_t max_number() const {
    uint32_t largest = kNanBits;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      largest = largest_number(largest, words[i] & 0x7FFFFFFFU);
    }
    return largest;
  }

  // The larger of two magnitudes; a number wins over NaN.
  __device__ static uint32_t largest_number(uint32_t a, uint32_t b) {
    return float_bits(fmaxf(bits_float(a), bits_float(b)));
  }
};

// Loads kBytes from `address`, 16-byte aligned, into the words of a run.
template <class Elements>
__device__ inline Elements load_elements(const void* address) {
  static_assert(Elements::kBytes % 16 == 0);
  Elements elements;
#pragma unroll
  for (int i = 0; i < Elements::kBytes / 16; ++i) {
    const auto part = load_readonly<uint4>(static_cast<const uint4*>(address) + i);
    elements.words[4 * i] = part.x;
    elements.words[4 * i + 1] = part.y;
    elements.words[4 * i + 2] = part.z;
    elements.words[4 * i + 3] = part.w;
  }
  return elements;
}

template <class Elements>
__device__ inline void store_elements(const Elements& elements, void* address) {
#pragma unroll
  for (int i = 0; i < Elements::kBytes / 16; ++i) {
    static_cast<uint4*>(address)[i] = {elements.words[4 * i], elements.words[4 * i + 1],
                                       elements.words[4 * i + 2], elements.words[4 * i + 3]};
  }
}

}  // namespace narrowfloat
