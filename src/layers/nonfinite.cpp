// Exponent bits decide: all ones mean NaN or infinity.
#include "layers/nonfinite.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

#include "runtime/parallel.h"

namespace narrowfloat {
namespace {

constexpr int64_t kScanGrain = 1 << 16;
constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

template <typename Bits>
int64_t count_in(const Bits* elements, Bits mask, int64_t begin, int64_t end) {
  int64_t count = 0;
  for (int64_t i = begin; i < end; ++i) count += (elements[i] & mask) == mask ? 1 : 0;
  return count;
}

// Whether there is one; compilers use vector instructions for it.
template <typename Bits>
bool has_any(const Bits* elements, Bits mask, int64_t begin, int64_t end) {
  Bits found = 0;
  for (int64_t i = begin; i < end; ++i) {
    found = static_cast<Bits>(found | ((elements[i] & mask) == mask ? 1 : 0));
  }
  return found != 0;
}

// The mask is passed by value: a constant of the inner loop.
template <typename Bits>
int64_t first_in(const Bits* elements, Bits mask, int64_t begin, int64_t end) {
  if (!has_any(elements, mask, begin, end)) return kNone;
  while ((elements[begin] & mask) != mask) ++begin;
  return begin;
}

int64_t first_in(const TensorView& view, int64_t begin, int64_t end) {
  if (view.dtype == DType::kF32) {
    return first_in(static_cast<const uint32_t*>(view.data), 0x7F800000U, begin, end);
  }
  const uint16_t mask = view.dtype == DType::kBF16 ? 0x7F80U : 0x7C00U;
  return first_in(static_cast<const uint16_t*>(view.data), mask, begin, end);
}

int64_t count_in(const TensorView& view, int64_t begin, int64_t end) {
  if (view.dtype == DType::kF32) {
    return count_in(static_cast<const uint32_t*>(view.data), 0x7F800000U, begin, end);
  }
  const uint16_t mask = view.dtype == DType::kBF16 ? 0x7F80U : 0x7C00U;
  return count_in(static_cast<const uint16_t*>(view.data), mask, begin, end);
}

BadScales bad_floats(std::span<const std::byte> scales) {
  BadScales bad;
  for (size_t at = 0; at < scales.size(); at += sizeof(float)) {
    float scale = 0;
    std::memcpy(&scale, &scales[at], sizeof(scale));
    if (!std::isfinite(scale)) {
      ++bad.nonfinite;
    } else if (scale < 0) {
      ++bad.negative;
    }
  }
  return bad;
}

}  // namespace

int64_t count_nonfinite(const TensorView& view) {
  std::atomic<int64_t> count = 0;
  parallel_for(view.num_elements(), kScanGrain,
               [&](int64_t begin, int64_t end) { count += count_in(view, begin, end); });
  return count;
}

BadScales bad_scales(ScaleType type, std::span<const std::byte> scales) {
  if (type == ScaleType::kF32) return bad_floats(scales);
  BadScales bad;
  for (const std::byte scale : scales) {
    const auto code = static_cast<uint8_t>(scale);
    if (type == ScaleType::kUE8M0) {
      bad.nonfinite += code == 0xFF ? 1 : 0;
    } else if ((code & 0x7FU) == 0x7FU) {
      ++bad.nonfinite;
    } else {
      bad.negative += code > 0x80 ? 1 : 0;
    }
  }
  return bad;
}

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
