// The kernels of row_kernels.h, written against a level of vector instructions: that of
// block_kernels_text.h, with
//   store_16<KernelInput>(out, x)   kLanes numbers, rounded to 16 bits; NaN is 0x7FFF
//   in_order_of_leaves(x)           moves the sum of run n of 8 elements to the lane where merge()
//                                   adds neighbours first
#pragma once

#include "formats/x86/fast_math_text.h"
#include "ops/quantize/x86/block_kernels_text.h"
#include "tensor/x86/exponential_text.h"

namespace narrowfloat::row_kernels {

// Stores number(a, b) of each pair of elements.
template <class Level, KernelInput kInput, typename Number>
void for_each_pair(const void* a, const void* b, int64_t count, void* out, const Number& number) {
  constexpr int64_t kLanes = Level::kLanes;
  const auto* first = static_cast<const uint16_t*>(a);
  const auto* second = static_cast<const uint16_t*>(b);
  auto* to = static_cast<uint16_t*>(out);
  const auto store = [&](const uint16_t* x, const uint16_t* y, uint16_t* result) {
    Level::template store_16<kInput>(
        result, number(Level::template load<kInput>(x, 0), Level::template load<kInput>(y, 0)));
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(first + i, second + i, to + i);
  if (i == count) return;
  uint16_t rest[3][kLanes] = {};
  const auto rest_bytes = static_cast<size_t>(count - i) * sizeof(uint16_t);
  std::memcpy(rest[0], first + i, rest_bytes);
  std::memcpy(rest[1], second + i, rest_bytes);
  store(rest[0], rest[1], rest[2]);
  std::memcpy(to + i, rest[2], rest_bytes);
}

template <class Level, KernelInput kInput>
void silu_mul(const void* gate, const void* up, int64_t count, void* out) {
  using Floats = typename Level::Floats;
  for_each_pair<Level, kInput>(gate, up, count, out, [](Floats g, Floats u) {
    const Floats e = exponential_text::exponential<Level>(Level::negated(g));
    return Level::mul(Level::div(g, Level::add(Level::floats(1.0F), e)), u);
  });
}

// The exponential's own denormal numbers do not show: it is added to 1.
template <class Level, KernelInput kInput>
[[gnu::noinline]] void flushed_silu_mul(const void* gate, const void* up, int64_t count,
                                        void* out) {
  using Floats = typename Level::Floats;
  for_each_pair<Level, kInput>(gate, up, count, out, [](Floats g, Floats u) {
    const Floats e = exponential_text::exponential<Level>(Level::negated(g));
    const Floats reciprocal = fast_math_text::rcp_approx<Level>(Level::add(Level::floats(1.0F), e));
    return Level::mul(Level::mul(g, reciprocal), u);
  });
}

template <class Level, KernelInput kInput>
void fast_silu_mul(const void* gate, const void* up, int64_t count, void* out) {
  fast_math_text::with_flushes<Level>(flushed_silu_mul<Level, kInput>, gate, up, count, out);
}

template <class Level, KernelInput kInput>
void multiply(const void* a, const void* b, int64_t count, void* out) {
  using Floats = typename Level::Floats;
  for_each_pair<Level, kInput>(a, b, count, out,
                               [](Floats x, Floats y) { return Level::mul(x, y); });
}

template <class Level, KernelInput kInput>
void add(const void* a, const void* b, int64_t count, void* out) {
  using Floats = typename Level::Floats;
  for_each_pair<Level, kInput>(a, b, count, out,
                               [](Floats x, Floats y) { return Level::add(x, y); });
}

template <class Level, KernelInput kInput>
void norm(const void* x, const void* weight, float factor, int64_t count, void* out) {
  using Floats = typename Level::Floats;
  const Floats factors = Level::floats(factor);
  for_each_pair<Level, kInput>(x, weight, count, out, [&](Floats element, Floats w) {
    return Level::mul(Level::mul(element, factors), Level::add(Level::floats(0.0F), w));
  });
}

// The lower 16 bits of each lane, and the upper ones, as fp32.
template <class Level, KernelInput kInput>
typename Level::Floats lower_half(typename Level::Ints pairs) {
  const auto upper = Level::template shift_left<16>(pairs);
  return kInput == KernelInput::kF16 ? Level::widen_f16(upper) : Level::floats(upper);
}
template <class Level, KernelInput kInput>
typename Level::Floats upper_half(typename Level::Ints pairs) {
  if constexpr (kInput == KernelInput::kF16) return Level::widen_f16(pairs);
  return Level::floats(Level::bit_and(pairs, static_cast<int32_t>(0xFFFF0000)));
}

// The sums of squares of kLanes runs of 8 elements, each a chain of fused multiply-adds. Elements
// are read as pairs: pairs j of four vectors' runs are brought into one vector.
template <class Level, KernelInput kInput>
typename Level::Floats sums_of_eight(const void* x, int64_t elem) {
  using Floats = typename Level::Floats;
  const auto load = [&](int i) { return Level::load_pairs(x, elem + i * 2 * Level::kLanes); };
  typename Level::Ints pairs[4] = {load(0), load(1), load(2), load(3)};
  block_kernels::transpose_in_lanes<Level>(pairs);
  Floats sum = Level::floats(0.0F);
  for (const auto& pair : pairs) {
    const Floats even = lower_half<Level, kInput>(pair);
    const Floats odd = upper_half<Level, kInput>(pair);
    sum = Level::fma(odd, odd, Level::fma(even, even, sum));
  }
  return Level::in_order_of_leaves(sum);
}

template <class Level, KernelInput kInput>
void norm_sums(const void* x, int64_t sums, float* out) {
  constexpr int kLanes = Level::kLanes;
  constexpr int64_t kElems = 8 * kLanes;
  const auto add = [](typename Level::Ints a, typename Level::Ints b) {
    return Level::bits(Level::add(Level::floats(a), Level::floats(b)));
  };
  for (int64_t i = 0; i < sums; i += kLanes) {
    const auto leaves = [&](int64_t sum) {
      return sum < sums ? Level::bits(sums_of_eight<Level, kInput>(x, sum * kElems))
                        : Level::ints(0);
    };
    float merged[kLanes];
    Level::store(merged, Level::floats(block_kernels::merged<Level, kLanes>(leaves, i, add)));
    const int64_t left = sums - i;
    std::memcpy(out + i, merged,
                static_cast<size_t>(left < kLanes ? left : kLanes) * sizeof(float));
  }
}

template <class Level>
constexpr RowKernels row_kernels_of() {
  using enum KernelInput;
  return {
      .silu_mul = {nullptr, silu_mul<Level, kBf16>, silu_mul<Level, kF16>},
      .fast_silu_mul = {nullptr, fast_silu_mul<Level, kBf16>, fast_silu_mul<Level, kF16>},
      .multiply = {nullptr, multiply<Level, kBf16>, multiply<Level, kF16>},
      .add = {nullptr, add<Level, kBf16>, add<Level, kF16>},
      .norm = {nullptr, norm<Level, kBf16>, norm<Level, kF16>},
      .norm_sums = {nullptr, norm_sums<Level, kBf16>, norm_sums<Level, kF16>},
      .norm_sum_elems = 8 * Level::kLanes,
  };
}

}  // namespace narrowfloat::row_kernels
