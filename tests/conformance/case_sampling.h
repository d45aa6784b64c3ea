// How conformance cases are drawn: every combination of the axes that a test names gets the same
// number of cases, each with a seed of its own.
//
//   NARROWFLOAT_CONFORMANCE_CASES=<factor>  multiplies the number of cases (default 1)
//   NARROWFLOAT_CONFORMANCE_CASE=<index>    runs this one case of each selected test: what the
//                                           repro line of a failure sets
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "support/random.h"

namespace narrowfloat::testing {

inline constexpr uint64_t kConformanceSeed = 20260801;

// Every other implementation must give the bytes of this one.
inline constexpr std::string_view kOracle = "cpu_reference";

// Cases of a test that has `base` by default.
int64_t num_cases(int64_t base);
// Calls body(index) for the cases of a combination.
void for_cases(int64_t base, const std::function<void(int64_t)>& body);
// The seed of a case: differs for every combination (any text) and index.
uint64_t case_seed(std::string_view combination, int64_t index);
// "repro: NARROWFLOAT_CONFORMANCE_CASE=17 NARROWFLOAT_FORCE=... conformance --gtest_filter=...".
std::string repro_line(std::string_view op, std::string_view implementation, int64_t index);

// Sizes on both sides of the tiles, sizes of real models, and sizes the layouts pad.
int64_t sample_rows(Random& random);
// A multiple of `multiple`.
int64_t sample_cols(Random& random, int64_t multiple);

}  // namespace narrowfloat::testing
