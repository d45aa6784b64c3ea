// Dequantization, maxima, relayout; and what all kinds of work share.
#include "cli/bench/work.h"

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

// Random bytes that are scales: E4M3, UE8M0 or F32 of any value.
Bytes scale_bytes(uint64_t size_bytes) {
  Bytes bytes(size_bytes);
  uint64_t state = 1;
  for (std::byte& byte : bytes) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    byte = static_cast<std::byte>(0x30U + (state >> 60U));
  }
  return bytes;
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

// From what quantization on the CPU makes of random values; back to the same type. Of the scales
// only those that count are read, never padding.
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

Work make_work(const SweepCase& what, Device device, RandomValues& values) {
  switch (what.op) {
    case BenchOp::kQuantize: {
      Work work = make_quantize_work(what, device);
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
