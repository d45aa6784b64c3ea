// Conformance tests of operations that write rows are run for each row format and type of input.
#pragma once

#include <string>
#include <utility>

#include <fmt/format.h>

#include "narrowfloat/moe_types.h"
#include "tensor/row_format.h"

namespace narrowfloat::testing {

using RowCombination = std::pair<RowFormat, DType>;

inline std::string row_combination_name(const RowCombination& combination) {
  return fmt::format("{}_from_{}", name(combination.first), name(combination.second));
}

}  // namespace narrowfloat::testing
