// The public maxima: checks, selects an implementation, runs it.
#include <array>

#include <fmt/format.h>

#include "base/throw_error.h"
#include "ops/amax/amax_problem.h"
#include "runtime/dispatch.h"
#include "tensor/view_checks.h"

namespace narrowfloat {

std::span<const AmaxImpl> amax_impls() {
  static const std::array kImpls {
#if defined(NARROWFLOAT_CUDA)
    kAmaxSm90, kAmaxSm80,
#endif
#if defined(NARROWFLOAT_VECTOR_LEVELS)
        kAmaxCpuAvx512, kAmaxCpuAvx2,
#endif
        kAmaxCpuBaseline, kAmaxCpuReference
  };
  return kImpls;
}

std::string to_string(const AmaxProblem& problem) {
  return fmt::format("{} {}x{} per {} on {}", name(problem.input), problem.rows, problem.cols,
                     problem.per_row ? "row" : "tensor", to_string(problem.device));
}

namespace {

void run(const TensorView& input, const TensorView& output, bool per_row, Stream stream) {
  require_dtype("input", input, {DType::kF32, DType::kF16, DType::kBF16});
  require_view("input", input);
  const int64_t cols = input.rank > 0 ? input.shape[static_cast<size_t>(input.rank - 1)] : 0;
  const RowMatrix rows = require_rows("input", input, cols);
  require_vector("output", output, DType::kF32, per_row ? rows.rows : 1, input.device);
  const std::array outputs{byte_range("output", output)};
  const std::array inputs{byte_range("input", input)};
  require_disjoint(outputs, inputs);
  const AmaxProblem problem{.input = input.dtype,
                            .device = input.device,
                            // Rows of no columns may be any number, too many to go over.
                            .rows = cols == 0 && !per_row ? 0 : rows.rows,
                            .cols = cols,
                            .per_row = per_row};
  const AmaxArgs args{
      .input = input.data, .input_stride = rows.stride, .output = static_cast<float*>(output.data)};
  select("amax", amax_impls(), problem).run(problem, args, stream);
}

}  // namespace

void tensor_amax(const TensorView& input, const TensorView& output, Stream stream) {
  run(input, output, false, stream);
}

void row_amax(const TensorView& input, const TensorView& output, Stream stream) {
  run(input, output, true, stream);
}

}  // namespace narrowfloat
