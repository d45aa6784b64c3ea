// Comparisons of tensors with golden ones: norms, steps of a type, codes.
#pragma once

#include <string_view>
#include <vector>

#include "golden/moe_golden_case.h"

namespace narrowfloat::testing {

// Relative distance in the Frobenius norm of everything, and of the worst row (moe spec 12.1).
struct Distance {
  double all = 0;
  double row = 0;
};
// Compares matrices [rows, cols]; fails where a value is not finite, or not 0 in a row that must be
// 0.
Distance distance(std::string_view what, const OwnedTensor& got, const OwnedTensor& expected);

// Elements that differ; fails where one differs by more than a step of the type plus `allowed`
// (empty, or one for each element).
int64_t count_unequal(std::string_view what, const OwnedTensor& got, const OwnedTensor& expected,
                      const std::vector<double>& allowed = {});

// Codes (or elements of BF16 and F32) that differ; U8 counts nibbles. Fails where one is more than
// a step of its type away.
int64_t count_codes(const OwnedTensor& got, const OwnedTensor& expected);
int64_t num_codes(const OwnedTensor& tensor);

// Fails unless the leading elements are `expected` and all others `rest`.
void expect_integers(std::string_view what, const OwnedTensor& got, const Json& expected,
                     int32_t rest);
// Weights [2, slots] as in the files: values and what they may differ by.
void expect_weights(const OwnedTensor& got, const OwnedTensor& expected);

}  // namespace narrowfloat::testing
