// The CPU implementations. The oracle computes one output element at a time; the others compute
// chunks of rows in parallel, the baseline slot after slot over a chunk, cpu_avx2 and cpu_avx512
// with the kernels of their vector level. Each element sees the same operations (moe spec 6.6):
//
//   a = +0;  for s ascending, row(t, s) >= 0:  a = fma(w[t, s], y[row(t, s), o], a)
//   out[t, o] = round(a)
#include <algorithm>
#include <array>

#include "base/float_ops.h"
#include "base/int_math.h"
#include "ops/combine/combine_problem.h"
#include "ops/combine/x86/combine_kernels.h"
#include "runtime/float_environment.h"
#include "runtime/parallel.h"
#include "runtime/vector_level.h"
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

CombineElement combine_element(DType dtype) {
  if (dtype == DType::kF32) return CombineElement::kF32;
  return dtype == DType::kBF16 ? CombineElement::kBf16 : CombineElement::kF16;
}

// Tokens with more slots, and columns that fill no vectors, are left to combine_piece().
constexpr int64_t kMaxKernelTerms = 64;
constexpr int64_t kKernelCols = 16;

void combine_with_kernels(const CombineProblem& problem, const CombineArgs& args,
                          const CombineKernels& kernels, const Piece& piece) {
  const int64_t cols = piece.count / kKernelCols * kKernelCols;
  if (problem.slots > kMaxKernelTerms || cols == 0) return combine_piece(problem, args, piece);
  std::array<CombineTerm, kMaxKernelTerms> terms;
  int64_t count = 0;
  for (int64_t s = 0; s < problem.slots; ++s) {
    const int64_t slot = piece.token * problem.slots + s;
    const int64_t row = args.slot_to_row[slot];
    if (row < 0) continue;
    const int64_t first = row * problem.hidden + piece.col;
    terms[static_cast<size_t>(count++)] = {
        .row = element_pointer(args.slot_rows, problem.slot_rows, first),
        .weight = slot_weight(problem, args, slot)};
  }
  const auto rows = static_cast<size_t>(combine_element(problem.slot_rows));
  const auto output = static_cast<size_t>(combine_element(problem.output));
  kernels.combine[rows][output](
      terms.data(), count, cols,
      element_pointer(args.output, problem.output, piece.token * args.output_stride + piece.col));
  if (cols < piece.count) {
    combine_piece(problem, args, {piece.token, piece.col + cols, piece.count - cols});
  }
}

// kernels: null for the portable loops.
void run_with(const CombineKernels* kernels, const CombineProblem& problem,
              const CombineArgs& args) {
  constexpr int64_t kGrainTerms = 32768;
  const int64_t pieces = ceil_div(problem.cols, kCombinedCols);
  const int64_t terms = std::min(problem.cols, kCombinedCols) * (problem.slots + 1);
  const int64_t grain = std::max<int64_t>(1, kGrainTerms / std::max<int64_t>(1, terms));
  parallel_for(problem.tokens * pieces, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t col = i % pieces * kCombinedCols;
      const Piece piece{i / pieces, col, std::min(kCombinedCols, problem.cols - col)};
      if (kernels != nullptr) {
        combine_with_kernels(problem, args, *kernels, piece);
      } else {
        combine_piece(problem, args, piece);
      }
    }
  });
}

void run_baseline(const CombineProblem& problem, const CombineArgs& args, Stream /*stream*/) {
  run_with(nullptr, problem, args);
}

Support supports(const CombineProblem& problem) { return cpu_only(problem.device); }

#if defined(NARROWFLOAT_VECTOR_LEVELS)

template <VectorLevel kLevel>
Support supports_level(const CombineProblem& problem) {
  return cpu_with(problem.device, kLevel);
}

template <VectorLevel kLevel>
void run_level(const CombineProblem& problem, const CombineArgs& args, Stream /*stream*/) {
  run_with(kLevel == VectorLevel::kAvx2 ? &kCombineKernelsAvx2 : &kCombineKernelsAvx512, problem,
           args);
}

#endif

}  // namespace

const CombineImpl kCombineCpuReference{"cpu_reference", supports, run_reference};
const CombineImpl kCombineCpuBaseline{"cpu_baseline", supports, run_baseline};
#if defined(NARROWFLOAT_VECTOR_LEVELS)
const CombineImpl kCombineCpuAvx2{"cpu_avx2", supports_level<VectorLevel::kAvx2>,
                                  run_level<VectorLevel::kAvx2>};
const CombineImpl kCombineCpuAvx512{"cpu_avx512", supports_level<VectorLevel::kAvx512>,
                                    run_level<VectorLevel::kAvx512>};
#endif

}  // namespace narrowfloat
