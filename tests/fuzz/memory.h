// Memory for the views of one fuzzed call: each view gets exactly the bytes that it says it spans,
// so that sanitizers see any access beyond them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <vector>

#include "base/int_math.h"
#include "fuzz/fuzz_input.h"
#include "narrowfloat/format.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat::testing {

// Calls that need more for one view are not made.
inline constexpr int64_t kMaxViewBytes = 1 << 18;

struct TooLarge {};  // Thrown to leave such a call.

class FuzzMemory {
 public:
  explicit FuzzMemory(const FuzzInput& input) : input_(input) {}

  // Gives the view its memory. A view that spans no number of bytes (negative extents, more than 63
  // bits) gets a few: no operation may accept it.
  void bind(TensorView& view) {
    if (view.is_absent()) return;
    const std::optional<int64_t> size = bytes_of(view);
    view.data = allocate(size.value_or(kFewBytes));
  }
  void bind(ScaleView& view) {
    const bool is_f32 = view.type == ScaleType::kF32;
    const std::optional<int64_t> size = checked_mul(view.capacity, is_f32 ? 4 : 1);
    view.data = allocate(size && *size >= 0 ? *size : kFewBytes);
  }
  void* allocate(int64_t num_bytes) {
    if (num_bytes > kMaxViewBytes) throw TooLarge{};
    const auto size = static_cast<size_t>(num_bytes);
    blocks_.emplace_back(static_cast<std::byte*>(::operator new(size, kAlignment)));
    input_.fill({blocks_.back().get(), size});
    return blocks_.back().get();
  }

 private:
  static constexpr std::align_val_t kAlignment{256};
  static constexpr int64_t kFewBytes = 64;

  struct Delete {
    void operator()(std::byte* block) const { ::operator delete(block, kAlignment); }
  };

  static std::optional<int64_t> bytes_of(const TensorView& view) {
    if (view.rank < 0 || view.rank > TensorView::kMaxRank) return std::nullopt;
    if (static_cast<int>(view.dtype) < 0 || static_cast<int>(view.dtype) >= kNumDTypes) return {};
    bool is_empty = false;
    std::optional<int64_t> last = 0;
    for (size_t axis = 0; axis < static_cast<size_t>(view.rank); ++axis) {
      if (view.shape[axis] < 0) return std::nullopt;
      if (view.shape[axis] == 0) is_empty = true;
      const auto span = checked_mul(view.shape[axis] - 1, view.strides[axis]);
      if (last) last = span && *span >= 0 ? checked_add(*last, *span) : std::nullopt;
    }
    if (is_empty) return 0;
    if (!last || *last > kMaxViewBytes) return last ? last : std::nullopt;
    return ((*last + 1) * bits(view.dtype) + 7) / 8;
  }

  const FuzzInput& input_;
  std::vector<std::unique_ptr<std::byte, Delete>> blocks_;
};

}  // namespace narrowfloat::testing
