// The rows that fused quantizers make, as functions of block_kernels.h's tables. Operands and
// results have 16 bits. A lane does the operations of formats/silu.h and formats/rms_norm.h in
// their order and rounds once, so results have the bits of row_source.h, NaN included.
#pragma once

#include <cstdint>

namespace narrowfloat {

struct RowKernels {
  using Combine = void (*)(const void* a, const void* b, int64_t count, void* out);

  // Indexed by input: those of bf16 and fp16 are set.
  Combine silu_mul[3];       // silu(a) * b, `exact`
  Combine fast_silu_mul[3];  // and `fast`
  Combine multiply[3];
  Combine add[3];
  // (x * factor) * (0 + weight)
  void (*norm[3])(const void* x, const void* weight, float factor, int64_t count, void* out);

  // Stores the sums of squares of `sums` runs of norm_sum_elems elements: subtrees of the tree of
  // formats/rms_norm.h.
  void (*norm_sums[3])(const void* x, int64_t sums, float* out);
  int64_t norm_sum_elems;
};

}  // namespace narrowfloat
