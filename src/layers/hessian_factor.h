// A factor M of a damped Hessian H = M^T M, M lower triangular: what GPTQ needs to round the
// columns of a weight one after another.
//
// With H, the mean of x x^T over the rows x that a weight w multiplies, the error e = w - q of a
// rounded row costs e H e^T = sum over j of (sum over i <= j of e_i M_ji)^2. Term j contains e_j
// and those of the columns before it only, so rounding w_j + (sum over i < j of e_i M_ji) / M_jj
// makes each term as small as the columns before it allow. These are the values of GPTQ, which gets
// them from the Cholesky factor of the inverse of H (Frantar et al., 2022); no inverse is needed
// here.
//
// Damping adds 1 % of the mean of H's diagonal to it; an H of zeros becomes the identity. Columns
// are taken in the order of falling diagonals (equal ones by their number), so that those that
// matter most are rounded first and the others make up for them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/function_ref.h"

namespace narrowfloat {

class HessianFactor {
 public:
  // Fills the row of H.
  using LoadRow = FunctionRef<void(int64_t row, std::span<float> values)>;

  // Throws kCorruptData if the damped H is not positive definite; `name` is what messages call H.
  // Its diagonal must be finite and not negative.
  HessianFactor(std::span<const float> diagonal, LoadRow load_row, const std::string& name);

  [[nodiscard]] int64_t cols() const { return static_cast<int64_t>(order_.size()); }
  // Column of the weight that is rounded at each step.
  [[nodiscard]] std::span<const int64_t> order() const { return order_; }
  // Row `step` of M up to its diagonal: step + 1 elements.
  [[nodiscard]] std::span<const double> row(int64_t step) const;

  static uint64_t buffer_bytes(int64_t cols);

 private:
  [[nodiscard]] std::span<double> mutable_row(int64_t step);
  void load(LoadRow load_row, double damping);
  void factor_band(int64_t begin, int64_t end, const std::string& name);
  void update_rows_before(int64_t begin, int64_t end);

  std::vector<int64_t> order_;
  std::vector<double> elements_;  // The rows of a lower triangle.
};

}  // namespace narrowfloat
