// Quantization of random values, plain and fused with what comes before it.
#include "cli/bench/work.h"
#include "narrowfloat/quantize.h"

namespace narrowfloat::cli {
namespace {

// The maxima that given scales are made for: the random values reach about 5.5, and products of two
// of them, which SiLU, smoothing and norms quantize, five times that. A scale that saturates blocks
// would measure what a quantizer does with bad scales.
constexpr float kPlainAmax = 6;
constexpr float kFusedAmax = 32;
// Second inputs are another part of the sequence of random values.
constexpr int64_t kWeightFirst = 1 << 20;
constexpr int64_t kResidualFirst = 1 << 12;

QuantizeOptions options_of(const SweepCase& what) {
  QuantizeOptions options;
  options.math = what.math;
  options.four_over_six.enabled = what.has_four_over_six;
  if (!what.is_scale_given || !has_tensor_scale(what.format)) return options;
  const float amax = what.source == QuantizeSource::kPlain ? kPlainAmax : kFusedAmax;
  if (format_info(what.format).has_global_scale) {
    options.encode_scale = encode_scale_from_amax(amax);
  } else {
    options.fp8_decode_scale = amax / 448;
  }
  return options;
}

// Buffers: the outputs first, at fixed positions, then the inputs of the source.
struct QuantizeBuffer {
  enum : size_t { kValuesAt, kScalesAt, kGlobalScalesAt, kInputAt, kSecondInputAt, kResidualAt };
};

void add_inputs(const SweepCase& what, Work& work) {
  using enum WorkBuffer::Role;
  const auto element_bytes = static_cast<uint64_t>(bits(what.dtype) / 8);
  const uint64_t row_bytes = static_cast<uint64_t>(what.cols) * element_bytes;
  const uint64_t matrix = row_bytes * static_cast<uint64_t>(what.rows);
  const uint64_t input = what.source == QuantizeSource::kSiluMul ? 2 * matrix : matrix;
  work.read_bytes = input;
  work.buffers.push_back({"input", kInput, input, {}, what.dtype});
  if (what.source == QuantizeSource::kPlain || what.source == QuantizeSource::kSiluMul) return;
  work.buffers.push_back({"weight", kInput, row_bytes, {}, what.dtype, kWeightFirst});
  work.read_bytes += row_bytes;
  if (what.source != QuantizeSource::kAddRmsNorm) return;
  work.buffers.push_back({"residual", kUpdated, matrix, {}, what.dtype, kResidualFirst});
  work.read_bytes += matrix;
  work.write_bytes += matrix;
}

void run_source(const SweepCase& what, Addresses at, const QuantizedView& output,
                const QuantizeOptions& options, Stream stream) {
  const Device where = output.scales.device;
  const auto matrix = [&](size_t position, int64_t cols) {
    return TensorView::contiguous(at[position], what.dtype, {what.rows, cols}, where);
  };
  const auto weight = [&] {
    return TensorView::contiguous(at[QuantizeBuffer::kSecondInputAt], what.dtype, {what.cols},
                                  where);
  };
  switch (what.source) {
    case QuantizeSource::kPlain:
      return quantize(matrix(QuantizeBuffer::kInputAt, what.cols), output, options, stream);
    case QuantizeSource::kSiluMul:
      return silu_mul_quantize(matrix(QuantizeBuffer::kInputAt, 2 * what.cols), output, options,
                               stream);
    case QuantizeSource::kSmooth:
      return smooth_quantize(matrix(QuantizeBuffer::kInputAt, what.cols), weight(), output, options,
                             stream);
    case QuantizeSource::kRmsNorm:
      return rmsnorm_quantize(matrix(QuantizeBuffer::kInputAt, what.cols), weight(), output, {},
                              options, stream);
    case QuantizeSource::kAddRmsNorm:
      return add_rmsnorm_quantize(matrix(QuantizeBuffer::kInputAt, what.cols),
                                  matrix(QuantizeBuffer::kResidualAt, what.cols), weight(), output,
                                  {}, options, stream);
  }
}

}  // namespace

Work make_quantize_work(const SweepCase& what, Device /*device*/) {
  const QuantizedLayout layout =
      quantized_layout(what.format, what.rows, what.cols, {.scale_layout = what.layout});
  const QuantizeOptions options = options_of(what);
  Work work;
  work.operation = "quantize";
  work.has_baseline = true;
  work.elements = what.rows * what.cols;
  using enum WorkBuffer::Role;
  const auto add_output = [&work](std::string_view name, int64_t size_bytes) {
    work.buffers.push_back({std::string(name), kOutput, static_cast<uint64_t>(size_bytes), {}});
    work.write_bytes += static_cast<uint64_t>(size_bytes);
  };
  add_output("values", layout.values_bytes);
  add_output("scales", layout.scales_bytes);
  add_output("global scales", layout.global_scales * static_cast<int64_t>(sizeof(float)));
  add_inputs(what, work);
  if (!what.is_scale_given) work.second_read_bytes = work.read_bytes;
  work.call = [what, layout, options](Addresses at, Device where, Stream stream) {
    const QuantizedView output =
        layout.bind(at[QuantizeBuffer::kValuesAt], at[QuantizeBuffer::kScalesAt],
                    reinterpret_cast<float*>(at[QuantizeBuffer::kGlobalScalesAt]), where);
    run_source(what, at, output, options, stream);
  };
  return work;
}

}  // namespace narrowfloat::cli
