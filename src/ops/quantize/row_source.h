// The rows to quantize, as fp32, for every source. A fused form is defined as its composition (spec
// 1.3): load() returns what the 16-bit tensor of the unfused operation would hold.
#pragma once

#include "ops/quantize/quantize_problem.h"
#include "ops/quantize/x86/row_kernels.h"

namespace narrowfloat {

class RowSource {
 public:
  // Reads through the pointers of `args`, which must outlive the source. kernels: null for portable
  // loops.
  RowSource(const QuantizeProblem& problem, const QuantizeArgs& args,
            const RowKernels* kernels = nullptr);

  // Returns the factor of the whole row that load() needs: 1 / rms for norms, 6 / g for E4M3 input,
  // else 1.
  [[nodiscard]] float row_factor(int64_t row, float encode_scale) const;
  // Loads elements [col, col + count) of a row of the flattened [batch * rows] matrix.
  void load(int64_t row, float factor, int64_t col, int64_t count, float* out) const;
  // Like load(), but E4M3 input is only decoded; maxima of a whole tensor are taken of these
  // values.
  void load_unscaled(int64_t row, float factor, int64_t col, int64_t count, float* out) const;

  // The elements of a row from `col` on where they are in memory, if load() only widens them; else
  // null.
  [[nodiscard]] const void* stored_row(int64_t row, int64_t col) const;
  // The same elements in the input's type: where they are in memory, or stored to `buffer`. Not for
  // E4M3 input, whose elements have another type.
  const void* narrow_row(int64_t row, float factor, int64_t col, int64_t count, void* buffer) const;

  // Adds the input into the residual, which becomes the input of the norm. Must be called once per
  // row, before anything is loaded from it.
  void add_residual(int64_t row) const;
  // Stores the row itself to norm_output.
  void store_norm(int64_t row) const;

 private:
  // Whether the kernels make the elements.
  [[nodiscard]] bool has_kernels() const;
  // Stores them in the input's type.
  void store_with_kernels(int64_t row, float factor, int64_t col, int64_t count, void* out) const;
  void load_silu(int64_t row, int64_t col, int64_t count, float* out) const;
  [[nodiscard]] float reciprocal_rms(int64_t row) const;
  [[nodiscard]] int64_t input_offset(int64_t row) const;
  [[nodiscard]] const void* input_at(int64_t row, int64_t col) const;

  const QuantizeProblem& problem_;
  const QuantizeArgs& args_;
  const RowKernels* kernels_;
};

}  // namespace narrowfloat
