// Elements are judged by their exponent bits: all ones for NaN and infinity.
#include "layers/nonfinite.h"

#include <atomic>
#include <limits>

#include "runtime/parallel.h"

namespace narrowfloat {
namespace {

constexpr int64_t kScanGrain = 1 << 16;
constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

// The mask is by value: a constant of the inner loop.
template <typename Bits>
int64_t first_in(const Bits* elements, Bits mask, int64_t begin, int64_t end) {
  while (begin < end && (elements[begin] & mask) != mask) ++begin;
  return begin < end ? begin : kNone;
}

int64_t first_in(const TensorView& view, int64_t begin, int64_t end) {
  if (view.dtype == DType::kF32) {
    return first_in(static_cast<const uint32_t*>(view.data), 0x7F800000U, begin, end);
  }
  const uint16_t mask = view.dtype == DType::kBF16 ? 0x7F80U : 0x7C00U;
  return first_in(static_cast<const uint16_t*>(view.data), mask, begin, end);
}

}  // namespace

int64_t first_nonfinite(const TensorView& view) {
  std::atomic<int64_t> first = kNone;
  parallel_for(view.num_elements(), kScanGrain, [&](int64_t begin, int64_t end) {
    const int64_t found = first_in(view, begin, end);
    int64_t known = first;
    while (found < known && !first.compare_exchange_weak(known, found)) {
    }
  });
  return first == kNone ? -1 : first.load();
}

}  // namespace narrowfloat
