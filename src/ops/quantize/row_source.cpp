// See row_source.h. Operands are widened to fp32 in chunks; y is rounded to the 16-bit type and
// widened again, as if it had been stored. The kernels of a vector level give the rounded y.
#include "ops/quantize/row_source.h"

#include <algorithm>
#include <array>

#include "base/int_math.h"
#include "formats/fp8_input.h"
#include "formats/rms_norm.h"
#include "formats/silu.h"
#include "ops/quantize/x86/block_kernels.h"
#include "tensor/element_io.h"

namespace narrowfloat {
namespace {

// Chunk of elements where a second operand needs a buffer.
constexpr int64_t kChunk = 256;

size_t kernel_input(DType dtype) {
  return static_cast<size_t>(dtype == DType::kBF16 ? KernelInput::kBf16 : KernelInput::kF16);
}

}  // namespace

RowSource::RowSource(const QuantizeProblem& problem, const QuantizeArgs& args,
                     const RowKernels* kernels)
    : problem_(problem), args_(args), kernels_(kernels) {}

int64_t RowSource::input_offset(int64_t row) const {
  return row / problem_.rows * args_.input_batch_stride + row % problem_.rows * args_.input_stride;
}

const void* RowSource::input_at(int64_t row, int64_t col) const {
  // After add_residual() the norm reads the sum that was stored.
  if (problem_.source == RowSourceKind::kAddRmsNorm) {
    return element_pointer(args_.residual, problem_.input, row * args_.residual_stride + col);
  }
  return element_pointer(args_.input, problem_.input, input_offset(row) + col);
}

const void* RowSource::stored_row(int64_t row, int64_t col) const {
  const bool is_stored =
      problem_.source == RowSourceKind::kPlain && problem_.input != DType::kF8E4M3;
  return is_stored ? input_at(row, col) : nullptr;
}

float RowSource::row_factor(int64_t row, float encode_scale) const {
  if (is_norm(problem_.source)) {
    return reciprocal_rms(row);
  }
  if (problem_.input != DType::kF8E4M3) return 1.0F;
  return problem_.math == MathMode::kExact ? Fp8Input<ExactMath>::factor(encode_scale)
                                           : Fp8Input<FastMath>::factor(encode_scale);
}

float RowSource::reciprocal_rms(int64_t row) const {
  RmsNormSum sum;
  std::array<float, kChunk> buffer;
  int64_t by_kernels = 0;
  if (kernels_ != nullptr) {
    const int64_t elems = kernels_->norm_sum_elems;
    const int64_t sums = problem_.cols / elems;
    for (int64_t first = 0; first < sums; first += kChunk) {
      const int64_t n = std::min(kChunk, sums - first);
      kernels_->norm_sums[kernel_input(problem_.input)](input_at(row, first * elems), n,
                                                        buffer.data());
      for (size_t i = 0; i < static_cast<size_t>(n); ++i) sum.add_subtree(buffer[i]);
    }
    by_kernels = sums * elems;
  }
  RmsNormSum rest;
  for (int64_t col = by_kernels; col < problem_.cols; col += kChunk) {
    const int64_t count = std::min(kChunk, problem_.cols - col);
    widen(problem_.input, input_at(row, col), count, buffer.data());
    rest.add(std::span(buffer).first(static_cast<size_t>(count)));
  }
  // The rest is the tree itself, or less than a subtree of the kernels.
  sum.add_subtree(rest.total());
  return reciprocal_rms_of_sum(sum.total(), problem_.cols, args_.norm_eps);
}

const void* RowSource::narrow_row(int64_t row, float factor, int64_t col, int64_t count,
                                  void* buffer) const {
  if (const void* stored = stored_row(row, col)) return stored;
  if (has_kernels()) {
    store_with_kernels(row, factor, col, count, buffer);
    return buffer;
  }
  std::array<float, kChunk> y;
  for (int64_t done = 0; done < count; done += kChunk) {
    const int64_t n = std::min(kChunk, count - done);
    load_unscaled(row, factor, col + done, n, y.data());
    narrow(problem_.input, y.data(), n, static_cast<uint16_t*>(buffer) + done);
  }
  return buffer;
}

bool RowSource::has_kernels() const {
  return kernels_ != nullptr && problem_.source != RowSourceKind::kPlain;
}

void RowSource::store_with_kernels(int64_t row, float factor, int64_t col, int64_t count,
                                   void* out) const {
  const size_t input = kernel_input(problem_.input);
  const void* x = input_at(row, col);
  if (problem_.source == RowSourceKind::kSiluMul) {
    const auto& silu_mul =
        problem_.math == MathMode::kExact ? kernels_->silu_mul : kernels_->fast_silu_mul;
    return silu_mul[input](x, input_at(row, problem_.cols + col), count, out);
  }
  const void* vector = element_pointer(args_.vector, problem_.input, col);
  if (problem_.source == RowSourceKind::kSmooth) {
    return kernels_->multiply[input](x, vector, count, out);
  }
  kernels_->norm[input](x, vector, factor, count, out);
}

void RowSource::load(int64_t row, float factor, int64_t col, int64_t count, float* out) const {
  if (problem_.input != DType::kF8E4M3) return load_unscaled(row, factor, col, count, out);
  const auto* codes = static_cast<const uint8_t*>(input_at(row, col));
  for (int64_t i = 0; i < count; ++i) {
    out[i] = problem_.math == MathMode::kExact ? Fp8Input<ExactMath>::widen(codes[i], factor)
                                               : Fp8Input<FastMath>::widen(codes[i], factor);
  }
}

void RowSource::load_unscaled(int64_t row, float factor, int64_t col, int64_t count,
                              float* out) const {
  if (has_kernels()) {
    std::array<uint16_t, kChunk> stored;
    for (int64_t done = 0; done < count; done += kChunk) {
      const int64_t n = std::min(kChunk, count - done);
      store_with_kernels(row, factor, col + done, n, stored.data());
      widen(problem_.input, stored.data(), n, out + done);
    }
    return;
  }
  if (problem_.source == RowSourceKind::kSiluMul) return load_silu(row, col, count, out);
  widen(problem_.input, input_at(row, col), count, out);
  if (problem_.source == RowSourceKind::kPlain) return;
  std::array<float, kChunk> vector;
  for (int64_t done = 0; done < count; done += kChunk) {
    const int64_t n = std::min(kChunk, count - done);
    widen(problem_.input, element_pointer(args_.vector, problem_.input, col + done), n,
          vector.data());
    float* y = out + done;
    for (int64_t i = 0; i < n; ++i) {
      y[i] = problem_.source == RowSourceKind::kSmooth
                 ? mul_rn(y[i], vector[static_cast<size_t>(i)])
                 : rms_norm_element(y[i], factor, vector[static_cast<size_t>(i)]);
    }
  }
  round_through(problem_.input, out, count);
}

void RowSource::load_silu(int64_t row, int64_t col, int64_t count, float* out) const {
  widen(problem_.input, input_at(row, col), count, out);
  std::array<float, kChunk> up;
  for (int64_t done = 0; done < count; done += kChunk) {
    const int64_t n = std::min(kChunk, count - done);
    widen(problem_.input, input_at(row, problem_.cols + col + done), n, up.data());
    float* y = out + done;
    for (int64_t i = 0; i < n; ++i) {
      const float u = up[static_cast<size_t>(i)];
      y[i] = problem_.math == MathMode::kExact ? silu_mul<ExactMath>(y[i], u)
                                               : silu_mul<FastMath>(y[i], u);
    }
  }
  round_through(problem_.input, out, count);
}

void RowSource::add_residual(int64_t row) const {
  const void* input = element_pointer(args_.input, problem_.input, input_offset(row));
  void* residual = element_pointer(args_.residual, problem_.input, row * args_.residual_stride);
  if (kernels_ != nullptr) {
    return kernels_->add[kernel_input(problem_.input)](input, residual, problem_.cols, residual);
  }
  std::array<float, kChunk> x;
  std::array<float, kChunk> r;
  for (int64_t col = 0; col < problem_.cols; col += kChunk) {
    const int64_t n = std::min(kChunk, problem_.cols - col);
    void* sum = element_pointer(residual, problem_.input, col);
    widen(problem_.input, element_pointer(input, problem_.input, col), n, x.data());
    widen(problem_.input, sum, n, r.data());
    for (size_t i = 0; i < static_cast<size_t>(n); ++i) x[i] = add_rn(x[i], r[i]);
    narrow(problem_.input, x.data(), n, sum);
  }
}

void RowSource::store_norm(int64_t row) const {
  void* out = element_pointer(args_.norm_output, problem_.input, row * problem_.cols);
  narrow_row(row, row_factor(row, 1.0F), 0, problem_.cols, out);
}

}  // namespace narrowfloat
