// Emulated: src/device/ptx/packed.cuh.
#pragma once

#include <cmath>

#include "base/float_ops.h"
#include "emulator/machine.h"
#include "formats/float16.h"

namespace narrowfloat {

namespace emulated_packed {

inline uint32_t halves(uint32_t a, uint32_t b, auto&& of) {
  const auto low = static_cast<uint16_t>(of(a & 0xFFFFU, b & 0xFFFFU));
  const auto high = static_cast<uint16_t>(of(a >> 16, b >> 16));
  return static_cast<uint32_t>(high) << 16 | low;
}

// The sign is of no use, and so another than the instruction's.
template <uint32_t kInfinity, bool kNanWins>
uint32_t max_abs(uint32_t a, uint32_t b) {
  return halves(a, b, [](uint32_t x, uint32_t y) -> uint32_t {
    const uint32_t p = x & 0x7FFFU;
    const uint32_t q = y & 0x7FFFU;
    const bool has_nan = p > kInfinity || q > kInfinity;
    if (has_nan && (kNanWins || (p > kInfinity && q > kInfinity))) return 0x7FFFU;
    if (has_nan) return p > kInfinity ? q : p;
    return p > q ? p : q;
  });
}

// A number wins over NaN, and 0 over -0.
inline double larger(double x, double y) {
  if (x != x || y != y) return x != x ? y : x;
  return x > y || (x == y && !std::signbit(x)) ? x : y;
}

template <class Of>
uint32_t of_bf16(uint32_t a, uint32_t b, Of&& of) {
  return halves(a, b, [&](uint32_t x, uint32_t y) {
    return double_to_bf16(of(static_cast<double>(bf16_to_float(static_cast<uint16_t>(x))),
                             static_cast<double>(bf16_to_float(static_cast<uint16_t>(y)))));
  });
}
template <class Of>
uint32_t of_f16(uint32_t a, uint32_t b, Of&& of) {
  return halves(a, b, [&](uint32_t x, uint32_t y) {
    // Products and sums of fp16 are exact in double, and fp32 has more than twice their bits.
    return float_to_f16(
        static_cast<float>(of(static_cast<double>(f16_to_float(static_cast<uint16_t>(x))),
                              static_cast<double>(f16_to_float(static_cast<uint16_t>(y))))));
  });
}

}  // namespace emulated_packed

inline uint32_t max_abs_bf16x2(uint32_t a, uint32_t b) {
  return emulated_packed::max_abs<0x7F80U, false>(a, b);
}
inline uint32_t max_abs_f16x2(uint32_t a, uint32_t b) {
  return emulated_packed::max_abs<0x7C00U, false>(a, b);
}
inline uint32_t max_abs_nan_bf16x2(uint32_t a, uint32_t b) {
  return emulated_packed::max_abs<0x7F80U, true>(a, b);
}
inline uint32_t max_abs_nan_f16x2(uint32_t a, uint32_t b) {
  return emulated_packed::max_abs<0x7C00U, true>(a, b);
}
inline uint32_t max_bf16x2(uint32_t a, uint32_t b) {
  return emulated_packed::of_bf16(a, b,
                                  [](double x, double y) { return emulated_packed::larger(x, y); });
}
inline uint32_t max_f16x2(uint32_t a, uint32_t b) {
  return emulated_packed::of_f16(a, b,
                                 [](double x, double y) { return emulated_packed::larger(x, y); });
}
inline uint32_t mul_f16x2(uint32_t a, uint32_t b) {
  return emulated_packed::of_f16(a, b, [](double x, double y) { return x * y; });
}
inline uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  return emulated_packed::of_bf16(a, b, [](double x, double y) { return x * y; });
}
inline uint32_t add_f16x2(uint32_t a, uint32_t b) {
  return emulated_packed::of_f16(a, b, [](double x, double y) { return x + y; });
}
inline uint32_t add_bf16x2(uint32_t a, uint32_t b) {
  return emulated_packed::of_bf16(a, b, [](double x, double y) { return x + y; });
}
inline uint32_t sub_bf16x2(uint32_t a, uint32_t b) {
  return emulated_packed::of_bf16(a, b, [](double x, double y) { return x - y; });
}
inline uint32_t low_halves(uint32_t pair) { return (pair & 0xFFFFU) * 0x10001U; }
inline uint32_t high_halves(uint32_t pair) { return (pair >> 16) * 0x10001U; }
inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  return emulator::permute_bytes(a, b, selector);
}

}  // namespace narrowfloat
