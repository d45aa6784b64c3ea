// Both CPU implementations of the group quantizer: the oracle runs row after row, the baseline runs
// rows in parallel. Groups depend only on their own elements.
#include <algorithm>
#include <array>

#include "ops/group_quantize/group_quantize_problem.h"
#include "runtime/float_environment.h"
#include "runtime/parallel.h"
#include "tensor/element_io.h"

namespace narrowfloat {
namespace {

constexpr int64_t kGroupChunk = 512;

uint8_t encode(DType output, float x) {
  if (output == DType::kF8E4M3) return E4M3::encode(x);
  return output == DType::kF8E5M2 ? E5M2::encode(x) : to_int8(x);
}

// Calls body(elements, first, count) on chunks of `count` elements from `first` on.
template <typename Body>
void for_pieces(DType dtype, const void* first, int64_t count, const Body& body) {
  std::array<float, kGroupChunk> x;
  for (int64_t i = 0; i < count; i += kGroupChunk) {
    const int64_t n = std::min(kGroupChunk, count - i);
    widen(dtype, element_pointer(first, dtype, i), n, x.data());
    body(x.data(), i, n);
  }
}

void quantize_group(const GroupQuantizeProblem& problem, const GroupQuantizeArgs& args, int64_t row,
                    int64_t group) {
  const int64_t col = group * problem.group_size;
  const void* first = element_pointer(args.input, problem.input, row * args.input_stride + col);
  AbsMax amax;
  for_pieces(problem.input, first, problem.group_size,
             [&](const float* x, int64_t, int64_t count) { amax.add(x, count); });
  const float scale = group_scale_of(amax.or_zero(), args.eps, largest_code(problem.output),
                                     problem.power_of_two_scales);
  const bool is_row_major = problem.scale_order == GroupScaleOrder::kRowMajor;
  const int64_t groups = problem.cols / problem.group_size;
  args.scales[is_row_major ? row * groups + group : group * args.scale_rows + row] = scale;
  const float reciprocal = div_rn(1.0F, scale);
  uint8_t* out = args.values + row * problem.cols + col;
  for_pieces(problem.input, first, problem.group_size,
             [&](const float* x, int64_t at, int64_t count) {
               for (int64_t i = 0; i < count; ++i) {
                 const float scaled = is_row_major ? mul_rn(x[i], reciprocal) : div_rn(x[i], scale);
                 out[at + i] = encode(problem.output, scaled);
               }
             });
}

void quantize_row(const GroupQuantizeProblem& problem, const GroupQuantizeArgs& args, int64_t row) {
  for (int64_t group = 0; group < problem.cols / problem.group_size; ++group) {
    quantize_group(problem, args, row, group);
  }
}

void clear_padding(const GroupQuantizeProblem& problem, const GroupQuantizeArgs& args) {
  if (problem.scale_order == GroupScaleOrder::kRowMajor) return;
  for (int64_t group = 0; group < problem.cols / problem.group_size; ++group) {
    float* scales = args.scales + group * args.scale_rows;
    std::fill(scales + problem.rows, scales + args.scale_rows, 0.0F);
  }
}

void run_reference(const GroupQuantizeProblem& problem, const GroupQuantizeArgs& args,
                   Stream /*stream*/) {
  const FloatEnvironmentGuard guard;
  clear_padding(problem, args);
  for (int64_t row = 0; row < problem.rows; ++row) quantize_row(problem, args, row);
}

void run_baseline(const GroupQuantizeProblem& problem, const GroupQuantizeArgs& args,
                  Stream /*stream*/) {
  constexpr int64_t kTaskElements = 16384;
  clear_padding(problem, args);
  const int64_t grain = row_grain(kTaskElements, problem.cols);
  parallel_for(problem.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) quantize_row(problem, args, row);
  });
}

Support supports(const GroupQuantizeProblem& problem) { return cpu_only(problem.device); }

}  // namespace

const GroupQuantizeImpl kGroupQuantizeCpuReference{"cpu_reference", supports, run_reference};
const GroupQuantizeImpl kGroupQuantizeCpuBaseline{"cpu_baseline", supports, run_baseline};

}  // namespace narrowfloat
