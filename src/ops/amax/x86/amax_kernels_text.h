// The kernels of amax_kernels.h, written against a level of vector instructions.
//
// Level is a type of an unnamed namespace with kBytes of a vector, and for integers of 16 and 32
// bits (Int) all<Int>(), load(), max<Int>() and up_to<Int>(x, limit), which clears integers above
// the limit.
#pragma once

#include <cstring>

#include "ops/amax/x86/amax_kernels.h"

namespace narrowfloat::amax_kernels {

// A vector's worth of elements that lie anywhere; those after `count` are 0.
template <class Level, typename Int>
typename Level::Ints load_some(const Int* x, int64_t count) {
  alignas(Level::kBytes) Int some[Level::kBytes / sizeof(Int)] = {};
  std::memcpy(some, x, static_cast<size_t>(count) * sizeof(Int));
  return Level::load(some);
}

template <class Level, typename Int>
uint32_t largest(const void* elements, int64_t count, Int infinity) {
  constexpr int64_t kLanes = Level::kBytes / sizeof(Int);
  constexpr int kVectors = 4;  // Independent maxima: each waits for its previous one.
  const auto* x = static_cast<const Int*>(elements);
  const auto limit = Level::template all<Int>(infinity);
  const auto magnitude =
      Level::template all<Int>(static_cast<Int>(sizeof(Int) == 2 ? 0x7FFF : 0x7FFFFFFF));
  const auto zero = Level::template all<Int>(0);
  typename Level::Ints maxima[kVectors] = {zero, zero, zero, zero};
  const auto add = [&](int vector, typename Level::Ints loaded) {
    const auto number = Level::template up_to<Int>(Level::bit_and(loaded, magnitude), limit);
    maxima[vector] = Level::template max<Int>(maxima[vector], number);
  };
  int64_t i = 0;
  for (; i + kVectors * kLanes <= count; i += kVectors * kLanes) {
    for (int j = 0; j < kVectors; ++j) add(j, Level::load(x + i + j * kLanes));
  }
  for (; i + kLanes <= count; i += kLanes) add(0, Level::load(x + i));
  if (i < count) add(0, load_some<Level>(x + i, count - i));
  const auto both = [](typename Level::Ints a, typename Level::Ints b) {
    return Level::template max<Int>(a, b);
  };
  alignas(Level::kBytes) Int lanes[kLanes];
  Level::store(lanes, both(both(maxima[0], maxima[1]), both(maxima[2], maxima[3])));
  Int result = 0;
  for (const Int lane : lanes) result = lane > result ? lane : result;
  return static_cast<uint32_t>(result);
}

template <class Level>
constexpr AmaxKernels amax_kernels_of() {
  return {.largest_of_32 = largest<Level, int32_t>, .largest_of_16 = largest<Level, int16_t>};
}

}  // namespace narrowfloat::amax_kernels
