// Matrix instructions of a warp, of compute capability 8.0.
#pragma once

#include "base/host_device.h"

namespace narrowfloat {

// mma.sync.m16n8k16 of bf16: d[16, 8] += a[16, 16] * b[16, 8], in fp32. Lane 4g + t has
//   a[0] = a(g, k)   a[1] = a(g + 8, k)   a[2] = a(g, k + 8)   a[3] = a(g + 8, k + 8)
//   b0 = b(k, g)     b1 = b(k + 8, g)     k and k + 1 in a word, k = 2t
//   d[0], d[1] = d(g, 2t), d(g, 2t + 1)   d[2], d[3] = d(g + 8, 2t), d(g + 8, 2t + 1)
// All lanes take part.
__device__ inline void multiply_add_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace narrowfloat
