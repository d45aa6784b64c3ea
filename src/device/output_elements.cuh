// Output elements by type: store_all stores kCount elements at once, store_one a single one. NaN is
// canonical.
#pragma once

#include "base/float_ops.h"
#include "device/packed16.cuh"
#include "device/vector_io.cuh"

namespace narrowfloat {

template <class Half>
struct HalfOutput {
  static constexpr int64_t kBytes = 2;
  __device__ static void store_one(float value, void* address) {
    store(address, static_cast<uint16_t>(Half::pack(value, 0.0F)));
  }
  template <int kCount>
  __device__ static void store_all(const float (&values)[kCount], void* address) {
    uint32_t words[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) words[i] = Half::pack(values[2 * i], values[2 * i + 1]);
    if constexpr (kCount == 8) {
      store(address, uint4{words[0], words[1], words[2], words[3]});
    } else {
      store(address, uint2{words[0], words[1]});
    }
  }
};

struct FloatOutput {
  static constexpr int64_t kBytes = 4;
  __device__ static void store_one(float value, void* address) {
    store(address, canonical_nan(value));
  }
  template <int kCount>
  __device__ static void store_all(const float (&values)[kCount], void* address) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      store(static_cast<float4*>(address) + i / 4,
            float4{canonical_nan(values[i]), canonical_nan(values[i + 1]),
                   canonical_nan(values[i + 2]), canonical_nan(values[i + 3])});
    }
  }
};

}  // namespace narrowfloat
