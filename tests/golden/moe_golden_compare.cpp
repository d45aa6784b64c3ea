// See moe_golden_compare.h.
#include "golden/moe_golden_compare.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include <gtest/gtest.h>

namespace narrowfloat::testing {
namespace {

// Distance of neighbours of the type at x.
double step(DType dtype, double x) {
  const int precision = dtype == DType::kF32 ? 24 : (dtype == DType::kF16 ? 11 : 8);
  const int least = dtype == DType::kF16 ? -14 : -126;
  const int exponent = x == 0 ? least : std::max(std::ilogb(x), least);
  return std::ldexp(1.0, exponent - (precision - 1));
}

}  // namespace

Distance distance(std::string_view what, const OwnedTensor& got, const OwnedTensor& expected) {
  Distance result;
  if (got.shape != expected.shape) {
    ADD_FAILURE() << what << ": shapes differ";
    return result;
  }
  const int64_t rows = expected.shape.at(0);
  const int64_t cols = rows == 0 ? 0 : expected.count() / rows;
  double all_error = 0;
  double all_norm = 0;
  for (int64_t r = 0; r < rows; ++r) {
    double error = 0;
    double norm = 0;
    for (int64_t i = r * cols; i < (r + 1) * cols; ++i) {
      const double e = got.at(i) - expected.at(i);
      error += e * e;
      norm += expected.at(i) * expected.at(i);
    }
    EXPECT_TRUE(std::isfinite(error)) << what << ": row " << r << " is not finite";
    EXPECT_TRUE(norm > 0 || error == 0) << what << ": row " << r << " must be zero";
    if (norm > 0) result.row = std::max(result.row, std::sqrt(error / norm));
    all_error += error;
    all_norm += norm;
  }
  if (all_norm > 0) result.all = std::sqrt(all_error / all_norm);
  return result;
}

int64_t count_unequal(std::string_view what, const OwnedTensor& got, const OwnedTensor& expected,
                      const std::vector<double>& allowed) {
  if (got.shape != expected.shape || got.dtype != expected.dtype) {
    ADD_FAILURE() << what << ": shapes or types differ";
    return 0;
  }
  int64_t unequal = 0;
  for (int64_t i = 0; i < expected.count(); ++i) {
    const double a = got.at(i);
    const double b = expected.at(i);
    if (a == b) continue;
    ++unequal;
    const double slack = allowed.empty() ? 0 : allowed[static_cast<size_t>(i)];
    const double bound = step(expected.dtype, std::max(std::abs(a), std::abs(b))) + slack;
    EXPECT_LE(std::abs(a - b), bound) << what << " at " << i << ": " << a << ", expected " << b;
    if (::testing::Test::HasFailure()) break;
  }
  return unequal;
}

int64_t num_codes(const OwnedTensor& tensor) {
  return tensor.count() * (tensor.dtype == DType::kU8 ? 2 : 1);
}

namespace {

// Position of a code among all codes of its type in the order of their values.
int64_t ordered(int64_t code, int num_bits) {
  const int64_t sign = int64_t{1} << (num_bits - 1);
  return (code & sign) != 0 ? -(code & (sign - 1)) : code;
}

// Moves the counter; fails for codes more than one step apart (moe spec 12.2, G2).
void compare_code(int64_t got, int64_t expected, int num_bits, int64_t* unequal) {
  if (got == expected) return;
  ++*unequal;
  EXPECT_LE(std::abs(ordered(got, num_bits) - ordered(expected, num_bits)), 1)
      << "codes " << got << " and " << expected << " of " << num_bits << " bits";
}

}  // namespace

int64_t count_codes(const OwnedTensor& got, const OwnedTensor& expected) {
  if (got.shape != expected.shape || got.dtype != expected.dtype) {
    ADD_FAILURE() << "codes: shapes or types differ";
    return 0;
  }
  const size_t width = static_cast<size_t>(bits(expected.dtype)) / 8;
  int64_t unequal = 0;
  for (size_t i = 0; i < expected.bytes.size(); i += width) {
    if (expected.dtype == DType::kU8) {
      compare_code(got.bytes[i] & 15, expected.bytes[i] & 15, 4, &unequal);
      compare_code(got.bytes[i] >> 4, expected.bytes[i] >> 4, 4, &unequal);
    } else if (width < 4) {
      int64_t codes[2] = {};
      for (size_t byte = width; byte-- > 0;) {
        codes[0] = codes[0] << 8 | got.bytes[i + byte];
        codes[1] = codes[1] << 8 | expected.bytes[i + byte];
      }
      // UE8M0 has no sign: its codes are their own order.
      const bool is_signed = expected.dtype != DType::kF8E8M0;
      compare_code(codes[0], codes[1], static_cast<int>(width) * 8 + (is_signed ? 0 : 1), &unequal);
    } else if (std::memcmp(&got.bytes[i], &expected.bytes[i], width) != 0) {
      ++unequal;  // F32: the callers compare distances.
    }
  }
  return unequal;
}

void expect_integers(std::string_view what, const OwnedTensor& got, const Json& expected,
                     int32_t rest) {
  const auto values = expected.get<std::vector<int32_t>>();
  ASSERT_GE(got.count(), static_cast<int64_t>(values.size())) << what;
  for (int64_t i = 0; i < got.count(); ++i) {
    const auto index = static_cast<size_t>(i);
    ASSERT_EQ(static_cast<int32_t>(got.at(i)), index < values.size() ? values[index] : rest)
        << what << " at " << i;
  }
}

void expect_weights(const OwnedTensor& got, const OwnedTensor& expected) {
  const int64_t slots = got.count();
  ASSERT_EQ(expected.count(), 2 * slots);
  for (int64_t i = 0; i < slots; ++i) {
    const double weight = expected.at(i);
    if (std::isfinite(weight)) {
      ASSERT_LE(std::abs(got.at(i) - weight), expected.at(slots + i))
          << "weight of slot " << i << ": " << got.at(i) << ", expected " << weight;
    } else {
      ASSERT_TRUE(std::isnan(weight) ? std::isnan(got.at(i)) : got.at(i) == weight)
          << "weight of slot " << i << ": " << got.at(i) << ", expected " << weight;
    }
  }
}

}  // namespace narrowfloat::testing
