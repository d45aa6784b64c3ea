// Quantization of random values, plain and fused with what comes before it, dequantization, maxima,
// relayout; and what all kinds of work share.
#include "bench_cli/work.h"

#include <algorithm>

#include "narrowfloat/error.h"
#include "narrowfloat/quantize.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat::cli {
namespace {

constexpr std::string_view kBaseline = "cpu_baseline";

ExplainRequest explain_request(const SweepCase& what, Device device) {
  return {.format = what.format,
          .scale_layout = what.layout,
          .math = what.math,
          .dtype = what.dtype,
          .rows = what.rows,
          .cols = what.cols,
          .device = device};
}

uint64_t matrix_bytes(const SweepCase& what) {
  return static_cast<uint64_t>(what.rows * what.cols * bits(what.dtype) / 8);
}

Work with_implementation(Work work, const SweepCase& what, Device device) {
  ExplainRequest request = explain_request(what, device);
  if (!what.has_format()) request.scale_layout.reset();
  const Explanation explanation = explain(work.operation, request);
  work.implementation = explanation.chosen;
  work.has_baseline =
      std::any_of(explanation.candidates.begin(), explanation.candidates.end(),
                  [](const Candidate& candidate) { return candidate.name == kBaseline; });
  return work;
}

// Random bytes that are scales of E4M3, UE8M0 or F32 of any value.
Bytes scale_bytes(uint64_t size_bytes) {
  Bytes bytes(size_bytes);
  uint64_t state = 1;
  for (std::byte& byte : bytes) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    byte = static_cast<std::byte>(0x30U + (state >> 60U));
  }
  return bytes;
}

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

Work make_quantize_work(const SweepCase& what) {
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

// Dequantizes what quantization on the CPU makes of random values, back to the same type. The
// padding of scales is not read.
Work make_dequantize_work(const SweepCase& what, Device device, RandomValues& values) {
  const QuantizedLayout layout =
      quantized_layout(what.format, what.rows, what.cols, {.scale_layout = what.layout});
  Bytes codes(static_cast<size_t>(layout.values_bytes));
  Bytes scales(static_cast<size_t>(layout.scales_bytes));
  Bytes global_scales(static_cast<size_t>(layout.global_scales) * sizeof(float));
  const std::span<const std::byte> matrix = values.get(what.dtype, 0, what.rows * what.cols);
  quantize(
      TensorView::contiguous(matrix.data(), what.dtype, {what.rows, what.cols}),
      layout.bind(codes.data(), scales.data(), reinterpret_cast<float*>(global_scales.data())));
  const auto used_scales = static_cast<uint64_t>(layout.scale_rows * layout.scale_blocks *
                                                 bytes(format_info(what.format).scale_type));
  Work work;
  work.operation = "dequantize";
  work.elements = what.rows * what.cols;
  work.read_bytes = codes.size() + used_scales + global_scales.size();
  work.write_bytes = matrix_bytes(what);
  using enum WorkBuffer::Role;
  const auto add = [&work](std::string_view name, Bytes content) {
    const uint64_t size = content.size();
    work.buffers.push_back({std::string(name), kInput, size, std::move(content)});
  };
  add("values", std::move(codes));
  add("scales", std::move(scales));
  add("global scales", std::move(global_scales));
  work.buffers.push_back({"output", kOutput, work.write_bytes, {}});
  work.call = [what, layout](Addresses at, Device where, Stream stream) {
    dequantize(layout.bind(at[0], at[1], reinterpret_cast<float*>(at[2]), where),
               TensorView::contiguous(at[3], what.dtype, {what.rows, what.cols}, where), {},
               stream);
  };
  return with_implementation(std::move(work), what, device);
}

Work make_amax_work(const SweepCase& what, Device device) {
  const bool is_per_row = what.op == BenchOp::kRowAmax;
  const int64_t results = is_per_row ? what.rows : 1;
  Work work;
  work.operation = "amax";
  work.elements = what.rows * what.cols;
  work.read_bytes = matrix_bytes(what);
  work.write_bytes = static_cast<uint64_t>(results) * sizeof(float);
  using enum WorkBuffer::Role;
  work.buffers.push_back({"input", kInput, work.read_bytes, {}, what.dtype});
  work.buffers.push_back({"maxima", kOutput, work.write_bytes, {}});
  work.call = [what, is_per_row, results](Addresses at, Device where, Stream stream) {
    const TensorView input =
        TensorView::contiguous(at[0], what.dtype, {what.rows, what.cols}, where);
    const TensorView output = TensorView::contiguous(at[1], DType::kF32, {results}, where);
    (is_per_row ? row_amax : tensor_amax)(input, output, stream);
  };
  return with_implementation(std::move(work), what, device);
}

// The padding of the target is written, that of the source is not read.
Work make_relayout_work(const SweepCase& what, Device device) {
  const ScaleLayoutId from = source_layout(what.format, what.layout);
  const QuantizedLayout layout =
      quantized_layout(what.format, what.rows, what.cols, {.scale_layout = what.layout});
  const ScaleType type = format_info(what.format).scale_type;
  const auto view = [layout, type](std::byte* data, ScaleLayoutId which, Device where) {
    return ScaleView{.data = data,
                     .type = type,
                     .layout = which,
                     .device = where,
                     .rows = layout.scale_rows,
                     .blocks = layout.scale_blocks,
                     .capacity = scale_image_size(which, layout.scale_rows, layout.scale_blocks)};
  };
  const auto size = static_cast<uint64_t>(bytes(type));
  const auto input_bytes =
      static_cast<uint64_t>(scale_image_size(from, layout.scale_rows, layout.scale_blocks)) * size;
  Work work;
  work.operation = "relayout";
  work.elements = layout.scale_rows * layout.scale_blocks;
  work.read_bytes = static_cast<uint64_t>(work.elements) * size;
  work.write_bytes = static_cast<uint64_t>(layout.scales_bytes);
  using enum WorkBuffer::Role;
  work.buffers.push_back({"input scales", kInput, input_bytes, scale_bytes(input_bytes)});
  work.buffers.push_back({"scales", kOutput, work.write_bytes, {}});
  work.call = [what, from, view](Addresses at, Device where, Stream stream) {
    relayout(what.format, view(at[0], from, where), view(at[1], what.layout, where), stream);
  };
  return with_implementation(std::move(work), what, device);
}

}  // namespace

std::span<const std::byte> RandomValues::get(DType dtype, int64_t first, int64_t count) {
  constexpr int64_t kChunk = int64_t{1} << 25U;
  Bytes& values = values_[dtype];
  const auto size = static_cast<uint64_t>(bits(dtype) / 8);
  const auto known = static_cast<int64_t>(values.size() / size);
  if (known < first + count) {
    values.resize(static_cast<uint64_t>(first + count) * size);
    std::byte* const memory = machine_.reserve(static_cast<uint64_t>(kChunk) * size);
    for (int64_t at = known; at < first + count; at += kChunk) {
      const int64_t length = std::min(kChunk, first + count - at);
      machine_.fill_random(memory, dtype, at, length);
      machine_.read(values.data() + static_cast<uint64_t>(at) * size, memory,
                    static_cast<uint64_t>(length) * size);
    }
  }
  return std::span(values).subspan(static_cast<uint64_t>(first) * size,
                                   static_cast<uint64_t>(count) * size);
}

Work make_work(const SweepCase& what, Device device, RandomValues& values) {
  switch (what.op) {
    case BenchOp::kQuantize: {
      Work work = make_quantize_work(what);
      // explain() knows the plain source only.
      if (what.source != QuantizeSource::kPlain) return work;
      return with_implementation(std::move(work), what, device);
    }
    case BenchOp::kDequantize:
      return make_dequantize_work(what, device, values);
    case BenchOp::kAmax:
    case BenchOp::kRowAmax:
      return make_amax_work(what, device);
    case BenchOp::kRelayout:
      return make_relayout_work(what, device);
    case BenchOp::kActivation:
      return make_activation_work(what, values);
    case BenchOp::kGroupQuantize:
    case BenchOp::kKvQuantize:
    case BenchOp::kKvDequantize:
    case BenchOp::kKvAppend:
    case BenchOp::kShuffle:
    case BenchOp::kPackBits:
      return with_implementation(make_small_work(what), what, device);
  }
  throw Error(ErrorKind::kDevice, "bench: no such operation");
}

}  // namespace narrowfloat::cli
