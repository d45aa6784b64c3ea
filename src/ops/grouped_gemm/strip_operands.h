// The operands of the inner loops of the CPU GEMMs: a chunk of k of one decoded strip, and a row of
// activations.
#pragma once

#include <cstdint>

namespace narrowfloat {

// Groups have `group_cols` columns; the last may be shorter.
template <typename Real>
struct WeightChunk {
  const Real* weights = nullptr;  // [cols][16]
  int64_t cols = 0;
  int64_t group_cols = 0;         // 0: sums continue from chunk to chunk.
  const Real* factors = nullptr;  // [groups of the chunk][16]
};

// One row: its values from the chunk's first column on, its factors from the chunk's first group
// on, and its 16 sums.
template <typename Real>
struct RowOperand {
  const Real* values = nullptr;
  const Real* factors = nullptr;
  Real* sums = nullptr;
};

}  // namespace narrowfloat
