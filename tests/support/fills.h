// Input data: the distributions that block formats get wrong, as bits of any input type.
#pragma once

#include <cstdint>
#include <string_view>

#include "narrowfloat/tensor.h"
#include "support/random.h"

namespace narrowfloat::testing {

enum class Fill : int {
  kRandomBits = 0,
  kNormal = 1,           // N(0, 1) times a random power of two.
  kNormalRows = 2,       // A power of two of its own for each run of 16 to 48 elements.
  kQuarterIntegers = 3,  // -8 to 8 in steps of 1/4: ties and code values.
  kDenormals = 4,
  kSparse = 5,    // Zeros of both signs with a few values.
  kSpecials = 6,  // Normal data with NaN (quiet, signalling, both signs) and infinities.
  kOnlySpecials = 7,
  kAllEqual = 8,
  kOutlier = 9,    // Small values and one large.
  kIntegers = 10,  // Small integers times one power of two.
  kZeros = 11,
  kExtremes = 12,  // The least and the largest finite magnitudes side by side.
};
inline constexpr int kNumFills = 13;
std::string_view name(Fill fill);
// True where no element is NaN or infinite.
bool is_finite(Fill fill);

// Writes `count` elements of `dtype` (F32, F16, BF16, F8_E4M3) to `out`.
void fill_elements(Fill fill, DType dtype, Random& random, int64_t count, void* out);

// The bits of `value` in `dtype`, rounded to nearest.
uint32_t element_bits(DType dtype, float value);
void store_element(DType dtype, uint32_t bits, int64_t index, void* out);
float load_element(DType dtype, const void* data, int64_t index);

}  // namespace narrowfloat::testing
