// Codes and scales of GemmData that follows a plan: a unit matrix against all codes and scales, and
// sums that lose bits in one tensor core accumulator.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "support/element_codes.h"
#include "support/gemm_case.h"

namespace narrowfloat::testing {

// The roles of a side.
enum class Plan : int { kNone = 0, kEveryCode = 1, kUnit = 2, kLarge = 3, kSmall = 4 };
inline Plan plan_of(GemmData data, bool is_input) {
  if (data == GemmData::kNeedsPromotion) return is_input ? Plan::kLarge : Plan::kSmall;
  if (data == GemmData::kEveryWeight) return is_input ? Plan::kUnit : Plan::kEveryCode;
  if (data == GemmData::kEveryInput) return is_input ? Plan::kEveryCode : Plan::kUnit;
  return Plan::kNone;
}

inline double planned_number(Plan plan, int64_t row, int64_t col) {
  if (plan == Plan::kUnit) return row == col ? 1 : 0;
  if (col >= 384) return col == 384 ? 1 : 0;
  return plan == Plan::kLarge ? 32 : 4;
}

inline unsigned planned_code(DType dtype, Plan plan, int64_t row, int64_t col) {
  const auto index = static_cast<unsigned>(row + col) % 256;
  if (plan == Plan::kEveryCode) {
    if (dtype == DType::kBF16) return 0x3F80 + index;
    if (dtype == DType::kU8) return index % 16;
    return (index & 0x7FU) == 0x7FU ? index - 1 : index;  // No NaN.
  }
  const double number = planned_number(plan, row, col);
  if (dtype == DType::kBF16) return std::bit_cast<uint32_t>(static_cast<float>(number)) >> 16;
  unsigned code = 0;
  while ((dtype == DType::kU8 ? decode_e2m1(code) : decode_e4m3(code)) != number) ++code;
  return code;
}

struct PlannedBlock {
  int64_t rows;
  int64_t row;
  int64_t block;
};
// A scale of a plan. Matrices of 256 rows and more have all bytes; of more than 128 rows those that
// MXFP4 has with one multiplication; of up to 128 the same; of fewer some that E4M3 can follow,
// too. The scales of a row differ a little.
inline uint8_t planned_scale(ScaleType type, Plan plan, const PlannedBlock& at) {
  const bool is_ue8m0 = type == ScaleType::kUE8M0;
  if (plan != Plan::kEveryCode) return is_ue8m0 ? 127 : 0x38;
  int64_t first = is_ue8m0 ? 16 : 8;
  if (at.rows > 128) first = at.rows >= 256 ? 0 : 129 - at.rows;
  return static_cast<uint8_t>(std::max<int64_t>(0, first + at.row - at.block % 4 * 3));
}

}  // namespace narrowfloat::testing
