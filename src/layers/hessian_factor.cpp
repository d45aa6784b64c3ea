// Cholesky's method from the last row to the first, in bands of rows that stay in the cache. Each
// element is computed in one order, whatever the number of threads.
#include "layers/hessian_factor.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/throw_error.h"
#include "runtime/parallel.h"

namespace narrowfloat {
namespace {

constexpr double kDamping = 0.01;  // A share of the mean of the diagonal.
constexpr int64_t kBandRows = 32;
constexpr int64_t kRowGrain = 8;

size_t triangle(int64_t rows) { return static_cast<size_t>(rows * (rows + 1) / 2); }

// to[i] -= factor * from[i].
void subtract_row(double factor, std::span<const double> from, std::span<double> to) {
  for (size_t i = 0; i < to.size(); ++i) to[i] -= factor * from[i];
}

}  // namespace

HessianFactor::HessianFactor(std::span<const float> diagonal, LoadRow load_row,
                             const std::string& name)
    : order_(diagonal.size()), elements_(triangle(static_cast<int64_t>(diagonal.size()))) {
  std::iota(order_.begin(), order_.end(), 0);
  std::stable_sort(order_.begin(), order_.end(), [&](int64_t a, int64_t b) {
    return diagonal[static_cast<size_t>(a)] > diagonal[static_cast<size_t>(b)];
  });
  const double sum = std::accumulate(diagonal.begin(), diagonal.end(), 0.0);
  // Zeros say nothing: with the identity every element is rounded by itself.
  load(load_row, sum > 0 ? kDamping * sum / static_cast<double>(diagonal.size()) : 1);
  for (int64_t end = cols(); end > 0; end -= kBandRows) {
    const int64_t begin = std::max<int64_t>(0, end - kBandRows);
    factor_band(begin, end, name);
    update_rows_before(begin, end);
  }
}

std::span<const double> HessianFactor::row(int64_t step) const {
  return std::span(elements_).subspan(triangle(step), static_cast<size_t>(step) + 1);
}

std::span<double> HessianFactor::mutable_row(int64_t step) {
  return std::span(elements_).subspan(triangle(step), static_cast<size_t>(step) + 1);
}

uint64_t HessianFactor::buffer_bytes(int64_t cols) {
  const uint64_t of_col = sizeof(int64_t) + 2 * sizeof(float);  // Order, diagonal, a row of H.
  return triangle(cols) * sizeof(double) + static_cast<uint64_t>(cols) * of_col;
}

void HessianFactor::load(LoadRow load_row, double damping) {
  std::vector<float> values(order_.size());
  for (int64_t step = 0; step < cols(); ++step) {
    load_row(order_[static_cast<size_t>(step)], values);
    const std::span<double> row = mutable_row(step);
    for (size_t i = 0; i < row.size(); ++i) {
      row[i] = static_cast<double>(values[static_cast<size_t>(order_[i])]);
    }
    row.back() += damping;
  }
}

// Computes rows [begin, end) of M; the rows after them are done and subtracted.
void HessianFactor::factor_band(int64_t begin, int64_t end, const std::string& name) {
  for (int64_t step = end - 1; step >= begin; --step) {
    const std::span<double> row = mutable_row(step);
    for (int64_t later = end - 1; later > step; --later) {
      const std::span<const double> done = mutable_row(later);
      subtract_row(done[row.size() - 1], done, row);
    }
    if (!(row.back() > 0) || !std::isfinite(row.back())) {
      throw_error(ErrorKind::kCorruptData,
                  "{} is not positive definite at column {}, also with {} % of the mean of its "
                  "diagonal added; calibrate again",
                  name, order_[static_cast<size_t>(step)], 100 * kDamping);
    }
    row.back() = std::sqrt(row.back());
    for (double& element : row.first(row.size() - 1)) element /= row.back();
  }
}

void HessianFactor::update_rows_before(int64_t begin, int64_t end) {
  parallel_for(begin, kRowGrain, [&](int64_t first, int64_t last) {
    for (int64_t step = first; step < last; ++step) {
      const std::span<double> row = mutable_row(step);
      for (int64_t later = end - 1; later >= begin; --later) {
        const std::span<const double> done = mutable_row(later);
        subtract_row(done[row.size() - 1], done, row);
      }
    }
  });
}

}  // namespace narrowfloat
