// Both CPU implementations. The oracle computes one output element at a time; the baseline computes
// chunks of rows in parallel, slot after slot over a chunk. Each element sees the same operations
// (moe spec 6.6):
//
//   a = +0;  for s ascending, row(t, s) >= 0:  a = fma(w[t, s], y[row(t, s), o], a)
//   out[t, o] = round(a)
#include <algorithm>
#include <array>

#include "base/float_ops.h"
#include "base/int_math.h"
#include "ops/combine/combine_problem.h"
#include "runtime/float_environment.h"
#include "runtime/parallel.h"
#include "tensor/element_io.h"

namespace narrowfloat {
namespace {

constexpr int64_t kCombinedCols = 1024;

float element(DType dtype, const void* data, int64_t index) {
  float value = 0.0F;
  widen(dtype, element_pointer(data, dtype, index), 1, &value);
  return value;
}

float slot_weight(const CombineProblem& problem, const CombineArgs& args, int64_t slot) {
  return problem.has_weights ? element(problem.weights, args.weights, slot) : 1.0F;
}

void run_reference(const CombineProblem& problem, const CombineArgs& args, Stream /*stream*/) {
  const FloatEnvironmentGuard guard;
  for (int64_t token = 0; token < problem.tokens; ++token) {
    for (int64_t col = 0; col < problem.cols; ++col) {
      float sum = 0.0F;
      for (int64_t s = 0; s < problem.slots; ++s) {
        const int64_t slot = token * problem.slots + s;
        const int64_t row = args.slot_to_row[slot];
        if (row < 0) continue;
        const float y = element(problem.slot_rows, args.slot_rows, row * problem.hidden + col);
        sum = fma_rn(slot_weight(problem, args, slot), y, sum);
      }
      narrow(problem.output, &sum, 1,
             element_pointer(args.output, problem.output, token * args.output_stride + col));
    }
  }
}

// Columns [col, col + count) of a token's output.
struct Piece {
  int64_t token;
  int64_t col;
  int64_t count;
};

void combine_piece(const CombineProblem& problem, const CombineArgs& args, const Piece& piece) {
  std::array<float, kCombinedCols> y;
  std::array<float, kCombinedCols> sum;
  std::fill_n(sum.begin(), piece.count, 0.0F);
  for (int64_t s = 0; s < problem.slots; ++s) {
    const int64_t slot = piece.token * problem.slots + s;
    const int64_t row = args.slot_to_row[slot];
    if (row < 0) continue;
    const int64_t first = row * problem.hidden + piece.col;
    widen(problem.slot_rows, element_pointer(args.slot_rows, problem.slot_rows, first), piece.count,
          y.data());
    const float weight = slot_weight(problem, args, slot);
    for (size_t i = 0; i < static_cast<size_t>(piece.count); ++i) {
      sum[i] = fma_rn(weight, y[i], sum[i]);
    }
  }
  const int64_t first = piece.token * args.output_stride + piece.col;
  narrow(problem.output, sum.data(), piece.count,
         element_pointer(args.output, problem.output, first));
}

void run_baseline(const CombineProblem& problem, const CombineArgs& args, Stream /*stream*/) {
  constexpr int64_t kGrainTerms = 32768;
  const int64_t pieces = ceil_div(problem.cols, kCombinedCols);
  const int64_t terms = std::min(problem.cols, kCombinedCols) * (problem.slots + 1);
  const int64_t grain = std::max<int64_t>(1, kGrainTerms / std::max<int64_t>(1, terms));
  parallel_for(problem.tokens * pieces, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t col = i % pieces * kCombinedCols;
      combine_piece(problem, args, {i / pieces, col, std::min(kCombinedCols, problem.cols - col)});
    }
  });
}

Support supports(const CombineProblem& problem) { return cpu_only(problem.device); }

}  // namespace

const CombineImpl kCombineCpuReference{"cpu_reference", supports, run_reference};
const CombineImpl kCombineCpuBaseline{"cpu_baseline", supports, run_baseline};

}  // namespace narrowfloat
