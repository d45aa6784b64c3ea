// See operation_calls.h.
#include "cuda/operation_calls.h"

#include <algorithm>
#include <memory>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "conformance/case_sampling.h"
#include "conformance/quantize_call.h"
#include "cuda/small_operation_calls.h"
#include "narrowfloat/activation.h"
#include "narrowfloat/combine.h"
#include "narrowfloat/error.h"
#include "narrowfloat/permute.h"
#include "narrowfloat/route.h"
#include "support/rows_tensor.h"

namespace narrowfloat::testing {
namespace {

// Drawn until there is something to do.
QuantizeCase sample_small_case(FormatId format, ScaleLayoutId layout, MathMode math,
                               uint64_t seed) {
  QuantizeCase c = sample_quantize_case(format, layout, math, seed);
  for (; c.rows == 0 || c.cols == 0 || c.batch == 0; ++seed) {
    c = sample_quantize_case(format, layout, math, seed);
  }
  return c;
}

OperationCall quantize_call(const QuantizeCase& c) {
  const auto buffers = std::make_shared<QuantizeBuffers>(make_buffers(c, {}));
  return {.name = to_string(c),
          .inputs = buffers->inputs(),
          .outputs = buffers->outputs(),
          .updates_in_place = c.source == RowSourceKind::kAddRmsNorm,
          .writes_everything = !c.valid_rows && !c.row_list,
          .queue = [c, buffers](const DeviceCopies& device, Stream stream) {
            queue_quantize(c, *buffers, device, stream);
          }};
}

struct DequantizeBuffers {
  QuantizedTensor input;
  Matrix output;
};

// Codes and scales are random bytes.
OperationCall dequantize_call(FormatId format, ScaleLayoutId layout, Random& random) {
  const int64_t rows = random.range(1, 150);
  const int64_t cols = 128 * random.range(1, 9);
  const auto dtype = random.pick({DType::kF32, DType::kBF16, DType::kF16});
  const auto b = std::make_shared<DequantizeBuffers>(DequantizeBuffers{
      .input = QuantizedTensor(quantized_layout(format, rows, cols, {.scale_layout = layout})),
      .output = Matrix({.dtype = dtype, .rows = rows, .cols = cols})});
  for (const GuardedBuffer* buffer : {&b->input.values, &b->input.scales}) {
    for (uint8_t& byte : buffer->span()) byte = static_cast<uint8_t>(random.bits());
  }
  for (float& scale : b->input.global_scale.span<float>()) scale = random.normal();
  return {.name = fmt::format("dequantize {} {} {}x{} -> {}", name(format), name(layout), rows,
                              cols, name(dtype)),
          .inputs = {&b->input.values, &b->input.scales, &b->input.global_scale},
          .outputs = {&b->output.buffer()},
          .queue = [b](const DeviceCopies& device, Stream stream) {
            dequantize(device.view(b->input.view), device.view(b->output.view()), {}, stream);
          }};
}

struct RelayoutBuffers {
  QuantizedTensor input;
  QuantizedTensor output;
};

OperationCall relayout_call(FormatId format, ScaleLayoutId from, ScaleLayoutId to, Random& random) {
  const int64_t rows = random.range(1, 300);
  const int64_t cols = 128 * random.range(1, 9);
  const auto b = std::make_shared<RelayoutBuffers>(RelayoutBuffers{
      .input = QuantizedTensor(quantized_layout(format, rows, cols, {.scale_layout = from})),
      .output = QuantizedTensor(quantized_layout(format, rows, cols, {.scale_layout = to}))});
  for (uint8_t& byte : b->input.scales.span()) byte = static_cast<uint8_t>(random.bits());
  return {.name = fmt::format("relayout {} {} -> {} {}x{}", name(format), name(from), name(to),
                              rows, cols),
          .inputs = {&b->input.scales},
          .outputs = {&b->output.scales},
          .queue = [b, format](const DeviceCopies& device, Stream stream) {
            relayout(format, device.view(b->input.view.scales), device.view(b->output.view.scales),
                     stream);
          }};
}

struct AmaxBuffers {
  Matrix input;
  Vector output;
};

OperationCall amax_call(DType dtype, bool per_row, Random& random) {
  const int64_t rows = random.range(1, 300);
  const int64_t cols = random.range(1, 3000);
  const auto b = std::make_shared<AmaxBuffers>(
      AmaxBuffers{.input = Matrix::filled({.dtype = dtype, .rows = rows, .cols = cols},
                                          Fill::kNormalRows, random.bits()),
                  .output = Vector(DType::kF32, per_row ? rows : 1)});
  return {
      .name = fmt::format("amax {} {}x{} {}", name(dtype), rows, cols, per_row ? "rows" : "all"),
      .inputs = {&b->input.buffer()},
      .outputs = {&b->output.buffer()},
      .queue = [b, per_row](const DeviceCopies& device, Stream stream) {
        const TensorView input = device.view(b->input.view());
        const TensorView output = device.view(b->output.view());
        per_row ? row_amax(input, output, stream) : tensor_amax(input, output, stream);
      }};
}

struct ActivationBuffers {
  RowsTensor input;
  Matrix wide_input;  // In place of it for other types.
  RowsTensor output;
  Vector slots;
};

// SwiGLU of 128 * n columns; all rows are named, in a scattered order.
OperationCall activation_call(DType input, RowFormat format, Random& random) {
  const int64_t rows = random.range(1, 70);
  const int64_t cols = 128 * random.range(1, 9);
  const auto b = std::make_shared<ActivationBuffers>();
  std::vector<int32_t> slots;
  for (int32_t row = 0; row < rows; ++row) {
    slots.push_back(row);
    std::swap(slots.back(), slots[static_cast<size_t>(random.range(0, row))]);
  }
  b->slots = Vector::of(DType::kI32, slots);
  b->output = RowsTensor(format, rows, cols, {}, ScaleOrder::kBlocksFirst);
  CodedRows from;
  const GuardedBuffer* data = nullptr;
  if (input == DType::kF8E4M3) {
    b->input = RowsTensor(RowFormat::kFp8Group, rows, 2 * cols, {}, ScaleOrder::kBlocksFirst);
    fill_elements(Fill::kNormal, DType::kF8E4M3, random, rows * 2 * cols, b->input.values.data());
    fill_elements(Fill::kNormal, DType::kF32, random, b->input.scales.size() / 4,
                  b->input.scales.data());
    from = b->input.view;
    data = &b->input.values;
  } else {
    b->wide_input = Matrix::filled({.dtype = input, .rows = rows, .cols = 2 * cols}, Fill::kNormal,
                                   random.bits());
    from.values = b->wide_input.view();
    data = &b->wide_input.buffer();
  }
  return {.name = fmt::format("activation {} -> {} {}x{}", name(input), name(format), rows, cols),
          .inputs = {data, &b->input.scales, &b->slots.buffer()},
          .outputs = {&b->output.values, &b->output.scales, &b->output.row_scale},
          .queue = [b, from, format](const DeviceCopies& device, Stream stream) {
            activate({.input = device.view(from),
                      .slot_to_row = device.view(b->slots.view()),
                      .format = format,
                      .output = device.view(b->output.view)},
                     stream);
          }};
}

struct RoutingBuffers {
  Matrix data;  // Logits, ids or rows.
  Vector map;
  Vector weights;
  GuardedBuffer output;
  Vector other_output;
  Vector errors;
};

OperationCall route_call(int32_t experts, int32_t top_k, Random& random) {
  const int64_t tokens = random.range(1, 700);
  const auto b = std::make_shared<RoutingBuffers>();
  b->data = Matrix::filled({.dtype = DType::kF32, .rows = tokens, .cols = experts}, Fill::kNormal,
                           random.bits());
  b->output = GuardedBuffer(tokens * top_k * 4, {});
  b->other_output = Vector(DType::kF32, tokens * top_k);
  b->errors = Vector(DType::kI64, 2);
  const RoutingConfig config{.method = RoutingMethod::kDefault, .experts = experts, .top_k = top_k};
  return {.name = fmt::format("route {} tokens to {} of {}", tokens, top_k, experts),
          .inputs = {&b->data.buffer()},
          .outputs = {&b->output, &b->other_output.buffer(), &b->errors.buffer()},
          .queue = [b, config, tokens](const DeviceCopies& device, Stream stream) {
            const auto view = [&](const GuardedBuffer& buffer, DType dtype) {
              return device.view(as_matrix(buffer, dtype, tokens, config.top_k));
            };
            route({.logits = device.view(b->data.view())}, config,
                  {.ids = view(b->output, DType::kI32),
                   .weights = view(b->other_output.buffer(), DType::kF32),
                   .errors = static_cast<DeviceErrors*>(device.view(b->errors.view()).data)},
                  stream);
          }};
}

// Ids are any bits: most of them out of range.
OperationCall route_given_call(int64_t tokens, Random& random) {
  constexpr RoutingConfig kConfig{.experts = 4000, .top_k = 6};
  const auto b = std::make_shared<RoutingBuffers>();
  b->data = Matrix::filled({.dtype = DType::kBF16, .rows = tokens, .cols = 2 * kConfig.top_k},
                           Fill::kRandomBits, random.bits());
  b->output = GuardedBuffer(tokens * kConfig.top_k * 4, {});
  b->other_output = Vector(DType::kF32, tokens * kConfig.top_k);
  b->errors = Vector(DType::kI64, 2);
  return {.name = fmt::format("route {} packed tokens", tokens),
          .inputs = {&b->data.buffer()},
          .outputs = {&b->output, &b->other_output.buffer(), &b->errors.buffer()},
          .queue = [b, tokens, kConfig](const DeviceCopies& device, Stream stream) {
            const auto view = [&](const GuardedBuffer& buffer, DType dtype) {
              return device.view(as_matrix(buffer, dtype, tokens, kConfig.top_k));
            };
            route({.packed = view(b->data.buffer(), DType::kI32)}, kConfig,
                  {.ids = view(b->output, DType::kI32),
                   .weights = view(b->other_output.buffer(), DType::kF32),
                   .errors = static_cast<DeviceErrors*>(device.view(b->errors.view()).data)},
                  stream);
          }};
}

OperationCall permute_call(int64_t tokens, Random& random) {
  constexpr int64_t kSlots = 8;
  const auto experts = static_cast<int32_t>(random.range(1, 300));
  const auto tile = 1 << random.range(0, 7);
  const PermutationLayout layout = permutation_layout(tokens, kSlots, experts, tile);
  const auto b = std::make_shared<RoutingBuffers>();
  b->map = Vector(DType::kI32, tokens * kSlots);
  for (int32_t& id : b->map.buffer().span<int32_t>()) {
    id = static_cast<int32_t>(random.range(-1, experts));
  }
  b->output = GuardedBuffer(layout.bytes, {});
  return {.name = fmt::format("permute {} tokens, {} experts, tile {}", tokens, experts, tile),
          .inputs = {&b->map.buffer()},
          .outputs = {&b->output},
          .queue = [b, layout, tokens, experts](const DeviceCopies& device, Stream stream) {
            const TensorView maps =
                device.view(as_matrix(b->output, DType::kI32, 1, layout.bytes / 4));
            permute(device.view(as_matrix(b->map.buffer(), DType::kI32, tokens, kSlots)), 0,
                    experts, layout.bind(maps.data, maps.device), stream);
          }};
}

OperationCall combine_call(DType rows_type, DType output_type, Random& random) {
  constexpr int64_t kSlots = 9;
  const int64_t tokens = random.range(1, 60);
  const int64_t rows = random.range(1, 200);
  const int64_t cols = 16 * random.range(1, 200);
  const auto b = std::make_shared<RoutingBuffers>();
  b->data = Matrix::filled({.dtype = rows_type, .rows = rows, .cols = cols}, Fill::kNormal,
                           random.bits());
  b->map = Vector(DType::kI32, tokens * kSlots);
  for (int32_t& row : b->map.buffer().span<int32_t>()) {
    row = static_cast<int32_t>(random.range(-1, rows - 1));
  }
  b->weights = Vector(DType::kF32, tokens * kSlots);
  fill_elements(Fill::kNormal, DType::kF32, random, tokens * kSlots, b->weights.buffer().data());
  b->output = GuardedBuffer(tokens * cols * bits(output_type) / 8, {});
  return {.name = fmt::format("combine {} rows of {} {} -> {} {}", rows, cols, name(rows_type),
                              tokens, name(output_type)),
          .inputs = {&b->data.buffer(), &b->map.buffer(), &b->weights.buffer()},
          .outputs = {&b->output},
          .queue = [b, tokens, cols, output_type](const DeviceCopies& device, Stream stream) {
            combine(device.view(b->data.view()), device.view(b->map.view()),
                    device.view(b->weights.view()),
                    device.view(as_matrix(b->output, output_type, tokens, cols)), stream);
          }};
}

class Sampler {
 public:
  Sampler(uint64_t seed, int64_t per_kind) : seed_(seed), random_(seed), per_kind_(per_kind) {}

  std::vector<OperationCall> draw() {
    for (const FormatInfo& info : all_formats()) {
      for (int layout = 0; layout < 4; ++layout) {
        const auto id = static_cast<ScaleLayoutId>(layout);
        if (!info.allows(id)) continue;
        draw_of(info, id);
      }
    }
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      add(amax_call(dtype, false, random_));
      add(amax_call(dtype, true, random_));
    }
    for (int format = 0; format <= static_cast<int>(RowFormat::kFp8Token); ++format) {
      add(activation_call(DType::kBF16, static_cast<RowFormat>(format), random_));
    }
    add(activation_call(DType::kF8E4M3, RowFormat::kFp8Group, random_));
    draw_routing();
    for (OperationCall& call : small_operation_calls(random_)) add(std::move(call));
    return std::move(calls_);
  }

 private:
  void draw_of(const FormatInfo& info, ScaleLayoutId layout) {
    for (int64_t i = 0; i < per_kind_; ++i) {
      for (const auto math : {MathMode::kExact, MathMode::kFast}) {
        const std::string kind = fmt::format("{} {} {}", name(info.id), name(layout), name(math));
        const uint64_t seed = case_seed(kind, static_cast<int64_t>(seed_) + i);
        add(quantize_call(sample_small_case(info.id, layout, math, seed)));
      }
      add(dequantize_call(info.id, layout, random_));
      for (int to = 0; to < 4; ++to) {
        const auto target = static_cast<ScaleLayoutId>(to);
        if (info.allows(target)) add(relayout_call(info.id, layout, target, random_));
      }
    }
  }

  // Every implementation at least once: few and many experts, slots and tokens.
  void draw_routing() {
    for (const auto& [experts, top_k] : {std::pair{60, 8}, {200, 6}, {500, 30}, {600, 5}}) {
      add(route_call(experts, top_k, random_));
    }
    for (const int64_t tokens : {30, 3000}) {
      add(route_given_call(tokens, random_));
      add(permute_call(tokens, random_));
    }
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      add(combine_call(dtype, DType::kBF16, random_));
      add(combine_call(DType::kBF16, dtype, random_));
    }
  }

  // Keeps what the GPU takes.
  void add(OperationCall call) {
    for (const GuardedBuffer* buffer : call.outputs) call.before.push_back(buffer->copy());
    const DeviceCopies device(call.buffers());
    try {
      call.queue(device, device.stream());
      calls_.push_back(std::move(call));
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kUnsupported) throw;
    }
  }

  uint64_t seed_;
  Random random_;
  int64_t per_kind_;
  std::vector<OperationCall> calls_;
};

}  // namespace

Buffers OperationCall::buffers() const {
  Buffers all = inputs;
  all.insert(all.end(), outputs.begin(), outputs.end());
  return all;
}

std::vector<OperationCall> sample_operation_calls(uint64_t seed, int64_t per_kind) {
  return Sampler(seed, per_kind).draw();
}

OutputBytes take_outputs(const OperationCall& call, const DeviceCopies& device) {
  EXPECT_TRUE(device.take_back()) << "a canary was overwritten: " << call.name;
  OutputBytes outputs;
  for (const GuardedBuffer* buffer : call.outputs) outputs.push_back(buffer->copy());
  return outputs;
}

void send(const OperationCall& call, const DeviceCopies& device) {
  for (size_t i = 0; i < call.outputs.size(); ++i) {
    std::ranges::copy(call.before[i], call.outputs[i]->data());
  }
  device.send();
}

OutputBytes run_alone(const OperationCall& call, const DeviceCopies& device, Stream stream) {
  send(call, device);
  call.queue(device, stream);
  synchronize_device(device.device());
  return take_outputs(call, device);
}

std::string difference(const OutputBytes& expected, const OutputBytes& actual) {
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto [e, a] = std::ranges::mismatch(expected[i], actual[i]);
    if (e == expected[i].end()) continue;
    return fmt::format("output {}: byte {} of {} is {:#04x}, expected {:#04x}", i,
                       e - expected[i].begin(), expected[i].size(), *a, *e);
  }
  return {};
}

}  // namespace narrowfloat::testing
