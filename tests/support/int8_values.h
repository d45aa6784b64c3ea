// Rows of activations in int8 (moe spec 2.1), written out again for the modes that round to it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "narrowfloat/tensor.h"

namespace narrowfloat::testing {

// Rounds values of fp32 or bf16 in blocks of 32.
inline void round_to_int8(std::vector<double>& values) {
  for (auto begin = values.begin(); begin != values.end(); begin += 32) {
    const auto end = begin + 32;
    const bool is_finite =
        std::all_of(begin, end, [](double value) { return std::isfinite(value); });
    float largest = 0x1p-100F;
    for (auto value = begin; value != end; ++value) {
      largest = std::max(largest, static_cast<float>(std::abs(*value)));
    }
    const float multiplier = 127.0F / largest;
    const float scale = 1.0F / multiplier;
    for (auto value = begin; value != end; ++value) {
      const double code = std::nearbyint(static_cast<float>(*value) * multiplier);
      *value = is_finite ? code * scale : std::numeric_limits<double>::quiet_NaN();
    }
  }
}

// Replaces the first of every 32 codes of bf16 or fp32, and its value, by 127: scales become 1.
inline void plant_int8_maxima(DType dtype, std::vector<uint8_t>& codes,
                              std::vector<double>& values) {
  const size_t size = dtype == DType::kF32 ? 4 : 2;
  for (size_t i = 0; i < values.size(); i += 32) {
    values[i] = 127;
    const float value = 127.0F;
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    if (size == 2) bits >>= 16;
    std::memcpy(codes.data() + i * size, &bits, size);
  }
}

}  // namespace narrowfloat::testing
