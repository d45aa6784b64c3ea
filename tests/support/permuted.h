// Runs permute() into guarded, poisoned memory.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "narrowfloat/permute.h"
#include "support/expert_ids.h"
#include "support/guarded_buffer.h"

namespace narrowfloat::testing {

inline std::span<const int32_t> ints(const TensorView& view) {
  return {static_cast<const int32_t*>(view.data), static_cast<size_t>(view.num_elements())};
}

inline PermutationLayout layout_of(const IdShape& shape) {
  return permutation_layout(shape.tokens, shape.slots, shape.local, shape.tile);
}

// The maps of a permutation and the memory they lie in.
struct Permuted {
  PermutationLayout layout;
  GuardedBuffer buffer;
  Permutation maps;

  // Memory only.
  explicit Permuted(const IdShape& shape, uint8_t poison = 0xFF)
      : layout(layout_of(shape)),
        buffer(layout.bytes, {.poison = poison}),
        maps(layout.bind(buffer.data())) {}
  Permuted(const IdShape& shape, const std::vector<int32_t>& ids, uint8_t poison = 0xFF)
      : Permuted(shape, poison) {
    permute(TensorView::contiguous(ids.data(), DType::kI32, {shape.tokens, shape.slots}),
            shape.offset, shape.local, maps);
  }

  [[nodiscard]] int32_t num_rows() const { return ints(maps.num_rows)[0]; }
  [[nodiscard]] int32_t num_tiles() const { return ints(maps.num_tiles)[0]; }
};

}  // namespace narrowfloat::testing
