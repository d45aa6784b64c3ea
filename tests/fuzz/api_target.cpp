// Calls of the public C++ API. Each starts from arguments that fit together, and changes some of
// their members to any number. The memory of a view is what the changed view says, so whatever the
// library accepts it must be able to do within that memory.
#include <array>
#include <cstdint>
#include <optional>

#include "base/int_math.h"
#include "fuzz/fuzz_input.h"
#include "fuzz/fuzz_targets.h"
#include "fuzz/memory.h"
#include "narrowfloat/narrowfloat.h"

namespace narrowfloat::testing {
namespace {

constexpr int kNumFormats = 7;
constexpr int kNumLayouts = 4;

// An extent of valid arguments: small, or any number.
int64_t small_extent(FuzzInput& input, int64_t multiple) {
  const uint8_t choice = input.byte();
  return choice < 240 ? multiple * (choice % 6) : input.extent();
}

// Changes a member of a view, mostly none.
void disturb(FuzzInput& input, TensorView& view) {
  const uint8_t choice = input.byte();
  if (choice < 176) return;
  const auto axis = static_cast<size_t>(choice % TensorView::kMaxRank);
  switch (choice / 16) {
    case 11:
      view.shape[axis] = input.extent();
      break;
    case 12:
      view.strides[axis] = input.extent();
      break;
    case 13:
      view.rank = input.byte() % 8 - 1;
      break;
    case 14:
      view.dtype = input.enumerator<DType>(kNumDTypes);
      break;
    default:
      view.shape[axis] = input.extent();
      view.strides[axis] = input.extent();
  }
}

void disturb(FuzzInput& input, ScaleView& view) {
  switch (input.byte()) {
    case 1:
      view.type = input.enumerator<ScaleType>(3);
      break;
    case 2:
      view.layout = input.enumerator<ScaleLayoutId>(kNumLayouts);
      break;
    case 3:
      view.batch = input.extent();
      break;
    case 4:
      view.rows = input.extent();
      break;
    case 5:
      view.blocks = input.extent();
      break;
    case 6:
      view.capacity = input.extent();
      break;
    default:
      break;
  }
}

void disturb(FuzzInput& input, QuantizedView& view) {
  switch (input.byte()) {
    case 1:
      view.format = input.enumerator<FormatId>(kNumFormats);
      break;
    case 2:
      view.batch = input.extent();
      break;
    case 3:
      view.rows = input.extent();
      break;
    case 4:
      view.cols = input.extent();
      break;
    default:
      break;
  }
  disturb(input, view.values);
  disturb(input, view.scales);
  disturb(input, view.global_scale);
}

// A dense view that is disturbed, with memory of its own. Extents may be any numbers.
TensorView tensor(FuzzInput& input, FuzzMemory& memory, DType dtype,
                  std::initializer_list<int64_t> shape) {
  TensorView view = TensorView::contiguous(nullptr, dtype, shape);
  disturb(input, view);
  memory.bind(view);
  return view;
}

// The same in one of eight cases, else no tensor.
TensorView optional_tensor(FuzzInput& input, FuzzMemory& memory, DType dtype,
                           std::initializer_list<int64_t> shape) {
  return input.byte() % 8 == 1 ? tensor(input, memory, dtype, shape) : TensorView{};
}

std::optional<float> optional_number(FuzzInput& input) {
  if (input.byte() % 8 != 1) return std::nullopt;
  return input.number();
}

void bind(FuzzMemory& memory, QuantizedView& view) {
  memory.bind(view.values);
  memory.bind(view.scales);
  memory.bind(view.global_scale);
}

QuantizedLayout any_layout(FuzzInput& input) {
  const auto format = input.enumerator<FormatId>(kNumFormats);
  const int64_t rows = small_extent(input, 1);
  const int64_t cols = small_extent(input, 64);
  QuantizedLayoutOptions options;
  const uint8_t choices = input.byte();
  if ((choices & 1U) != 0) options.scale_layout = input.enumerator<ScaleLayoutId>(kNumLayouts);
  if ((choices & 2U) != 0) options.batch = small_extent(input, 1);
  if ((choices & 12U) == 12U) options.alignment = input.extent();
  if ((choices & 48U) == 48U) options.groups = small_extent(input, 1);
  if ((choices & 64U) != 0) options.global_scale_axis = input.enumerator<ScaleAxis>(3);
  const QuantizedLayout layout = quantized_layout(format, rows, cols, options);
  for (const int64_t size :
       {layout.value_cols, layout.values_bytes, layout.scale_rows, layout.scale_blocks,
        layout.scale_count, layout.scales_bytes, layout.global_scales}) {
    fuzz_require(size >= 0, "size of a layout");
  }
  return layout;
}

QuantizeOptions any_options(FuzzInput& input, FuzzMemory& memory, const QuantizedLayout& layout) {
  QuantizeOptions options;
  const int64_t batch = layout.batch;
  if (input.byte() % 8 == 1) options.math = input.enumerator<MathMode>(2);
  options.encode_scale = optional_number(input);
  options.encode_scales = optional_tensor(input, memory, DType::kF32, {input.flag() ? batch : 1});
  if (input.byte() % 8 == 1) {
    options.four_over_six = {true, input.enumerator<FourOverSixError>(2),
                             input.enumerator<FourOverSixMath>(2), input.flag() ? 448 : 256};
  }
  if (input.byte() % 64 == 1) options.four_over_six.e4m3_max = input.extent32();
  options.base_decode_scale = optional_number(input);
  options.base_decode_scales = optional_tensor(input, memory, DType::kF32, {1});
  options.row_list = optional_tensor(input, memory, DType::kI32, {small_extent(input, 1)});
  if (input.byte() % 8 == 1) options.mx_scale = input.enumerator<Ue8m0Rounding>(3);
  if (input.byte() % 8 == 1) options.fp8_rule = input.enumerator<Fp8ScaleRule>(4);
  options.fp8_eps = optional_number(input);
  options.fp8_decode_scale = optional_number(input);
  options.valid_rows = optional_tensor(input, memory, DType::kI32, {batch});
  options.row_offsets = optional_tensor(input, memory, DType::kI64, {small_extent(input, 1)});
  return options;
}

// Rows of elements of a quantizer's type, with gaps between them in some cases.
TensorView any_rows(FuzzInput& input, FuzzMemory& memory, const QuantizedLayout& layout) {
  constexpr std::array kTypes = {DType::kBF16, DType::kF16, DType::kF32, DType::kF8E4M3};
  const auto dtype = input.pick<DType>(kTypes);
  const int64_t rows = checked_mul(layout.batch, layout.rows).value_or(layout.rows);
  TensorView view = input.flag() ? TensorView::contiguous(nullptr, dtype, {rows, layout.cols})
                                 : TensorView::contiguous(nullptr, dtype,
                                                          {layout.batch, layout.rows, layout.cols});
  disturb(input, view);
  memory.bind(view);
  return view;
}

void fuzz_quantize(FuzzInput& input, FuzzMemory& memory) {
  const QuantizedLayout layout = any_layout(input);
  QuantizedView output = layout.bind(nullptr, nullptr, nullptr);
  disturb(input, output);
  bind(memory, output);
  const TensorView rows = any_rows(input, memory, layout);
  const QuantizeOptions options = any_options(input, memory, layout);
  switch (input.byte() % 8) {
    case 0:
      silu_mul_quantize(tensor(input, memory, DType::kBF16,
                               {layout.rows, checked_mul(2, layout.cols).value_or(1)}),
                        output, options);
      break;
    case 1:
      smooth_quantize(rows, tensor(input, memory, DType::kBF16, {layout.cols}), output, options);
      break;
    case 2: {
      RmsNormOptions norm;
      norm.norm_output = optional_tensor(input, memory, rows.dtype, {layout.rows, layout.cols});
      rmsnorm_quantize(rows, tensor(input, memory, rows.dtype, {layout.cols}), output, norm,
                       options);
      break;
    }
    case 3: {
      const TensorView residual = tensor(input, memory, rows.dtype, {layout.rows, layout.cols});
      add_rmsnorm_quantize(rows, residual, tensor(input, memory, rows.dtype, {layout.cols}), output,
                           {}, options);
      break;
    }
    default:
      quantize(rows, output, options);
  }
}

void fuzz_dequantize(FuzzInput& input, FuzzMemory& memory) {
  const QuantizedLayout layout = any_layout(input);
  QuantizedView view = layout.bind(nullptr, nullptr, nullptr);
  disturb(input, view);
  bind(memory, view);
  DequantizeOptions options;
  options.global_scale_divides = input.byte() % 8 == 1;
  options.row_offsets = optional_tensor(input, memory, DType::kI64, {small_extent(input, 1)});
  dequantize(view, any_rows(input, memory, layout), options);
}

void fuzz_relayout(FuzzInput& input, FuzzMemory& memory) {
  const QuantizedLayout layout = any_layout(input);
  ScaleView from = layout.bind(nullptr, nullptr, nullptr).scales;
  ScaleView to = from;
  to.layout = input.enumerator<ScaleLayoutId>(kNumLayouts);
  to.capacity = checked_mul(to.batch, scale_image_size(to.layout, to.rows, to.blocks)).value_or(-1);
  disturb(input, from);
  disturb(input, to);
  memory.bind(from);
  memory.bind(to);
  relayout(layout.format, from, to);
  if (from.rows > 0 && from.blocks > 0) {
    const int64_t offset =
        scale_offset(from.layout, from.rows - 1, from.blocks - 1, from.rows, from.blocks);
    fuzz_require(offset >= 0 && offset < scale_image_size(from.layout, from.rows, from.blocks),
                 "offset of a scale");
  }
}

void fuzz_amax(FuzzInput& input, FuzzMemory& memory) {
  const int64_t rows = small_extent(input, 1);
  const TensorView view = tensor(input, memory, DType::kBF16, {rows, small_extent(input, 8)});
  if (input.flag()) {
    tensor_amax(view, tensor(input, memory, DType::kF32, {1}));
  } else {
    row_amax(view, tensor(input, memory, DType::kF32, {rows}));
  }
}

void fuzz_group_quantize(FuzzInput& input, FuzzMemory& memory) {
  const int64_t rows = small_extent(input, 1);
  const int64_t cols = small_extent(input, 64);
  GroupQuantizeOptions options;
  options.group_size = input.flag() ? 64 : input.extent();
  options.eps = optional_number(input).value_or(options.eps);
  options.scale_order = input.enumerator<GroupScaleOrder>(3);
  options.power_of_two_scales = input.flag();
  const TensorView view = tensor(input, memory, DType::kBF16, {rows, cols});
  const TensorView values = tensor(input, memory, DType::kF8E4M3, {rows, cols});
  const TensorView scales = tensor(input, memory, DType::kF32, {rows, cols / 64});
  quantize_group_8bit(view, values, scales, options);
}

void fuzz_permute(FuzzInput& input, FuzzMemory& memory) {
  const int64_t tokens = small_extent(input, 1);
  const int64_t slots = small_extent(input, 1);
  const int32_t experts = input.extent32();
  const int32_t tile = input.flag() ? default_token_tile(tokens, slots, experts) : input.extent32();
  const PermutationLayout layout = permutation_layout(tokens, slots, experts, tile);
  fuzz_require(layout.max_rows >= 0 && layout.max_tiles >= 0 && layout.bytes >= 0,
               "size of a permutation");
  const Permutation permutation = layout.bind(memory.allocate(layout.bytes));
  const TensorView ids = tensor(input, memory, DType::kI32, {tokens, slots});
  permute(ids, input.extent32(), experts, permutation);
}

RoutingConfig any_routing(FuzzInput& input) {
  RoutingConfig config{.method = input.enumerator<RoutingMethod>(10), .experts = 8, .top_k = 2};
  for (int32_t* member : {&config.experts, &config.top_k, &config.shared_experts, &config.n_group,
                          &config.topk_group}) {
    if (input.byte() % 8 == 1) *member = input.extent32();
  }
  config.routed_scale = optional_number(input).value_or(1.0F);
  config.norm_topk = input.byte() % 8 != 1;
  return config;
}

void fuzz_route(FuzzInput& input, FuzzMemory& memory) {
  const RoutingConfig config = any_routing(input);
  check_routing_config(config);
  const int64_t tokens = small_extent(input, 1);
  const int64_t slots = int64_t{config.top_k} + config.shared_experts;
  Routing routing;
  if (input.flag()) {
    routing.logits = tensor(input, memory, DType::kF32, {tokens, config.experts});
    routing.bias = optional_tensor(input, memory, DType::kF32, {config.experts});
  } else {
    routing.ids = tensor(input, memory, DType::kI32, {tokens, config.top_k});
    routing.weights = optional_tensor(input, memory, DType::kF32, {tokens, config.top_k});
  }
  RouteOutputs outputs;
  outputs.ids = tensor(input, memory, DType::kI32, {tokens, slots});
  outputs.weights = tensor(input, memory, DType::kF32, {tokens, slots});
  outputs.replay = optional_tensor(input, memory, DType::kI16, {tokens, config.top_k});
  route(routing, config, outputs);
}

MoeConfig any_moe(FuzzInput& input) {
  MoeConfig config;
  config.mode = input.enumerator<MoeMode>(12);
  config.hidden = config.inter = 128;
  config.routing = any_routing(input);
  config.local_experts = config.routing.experts;
  config.activation.kind =
      input.flag() ? ActivationKind::kSwiglu : input.enumerator<ActivationKind>(11);
  const uint8_t choice = input.byte();
  if (choice == 1) config.hidden = input.extent();
  if (choice == 2) config.inter = input.extent();
  if (choice == 3) config.expert_offset = input.extent32();
  if (choice == 4) config.local_experts = input.extent32();
  if (choice == 5) config.gate_order = input.enumerator<GateOrder>(3);
  if (choice == 6) config.out_dtype = input.enumerator<DType>(kNumDTypes);
  if (choice == 7) config.slot_dtype = input.enumerator<DType>(kNumDTypes);
  if (choice == 8) config.token_tile = input.extent32();
  if (choice == 9) config.weight_on_input = true;
  return config;
}

// Weights of a mode; extents may be any numbers.
WeightView any_weights(FuzzInput& input, FuzzMemory& memory, WeightFormat format, int64_t experts,
                       int64_t rows, int64_t cols) {
  WeightView weights;
  ScaleView& scales = weights.scales;
  scales.batch = experts;
  scales.rows = rows;
  switch (format) {
    case WeightFormat::kBf16:
      weights.values = TensorView::contiguous(nullptr, DType::kBF16, {experts, rows, cols});
      break;
    case WeightFormat::kFp8Block:
      scales.type = ScaleType::kF32;
      scales.rows = rows / 128;
      scales.blocks = cols / 128;
      break;
    case WeightFormat::kMxfp8:
    case WeightFormat::kMxfp4:
      scales.type = ScaleType::kUE8M0;
      scales.blocks = cols / 32;
      break;
    case WeightFormat::kNvfp4:
      scales.blocks = cols / 16;
      break;
    default:
      break;
  }
  const bool is_4bit = format == WeightFormat::kMxfp4 || format == WeightFormat::kNvfp4;
  if (is_4bit) {
    weights.values = TensorView::contiguous(nullptr, DType::kU8, {experts, rows, cols / 2});
  } else if (format != WeightFormat::kBf16) {
    weights.values = TensorView::contiguous(nullptr, DType::kF8E4M3, {experts, rows, cols});
  }
  disturb(input, weights.values);
  memory.bind(weights.values);
  if (scales.blocks != 0) {
    scales.capacity =
        checked_mul(experts, scale_image_size(scales.layout, scales.rows, scales.blocks))
            .value_or(-1);
    disturb(input, scales);
    memory.bind(scales);
  }
  return weights;
}

void fuzz_moe(FuzzInput& input, FuzzMemory& memory) {
  // Half of the cases are about plans, whose numbers may be any, half about runs, which are small.
  if (input.flag()) {
    const MoeConfig config = any_moe(input);
    const int64_t tokens = input.extent();
    const MoePlanInfo plan = plan_moe(config, tokens);
    fuzz_require(plan.workspace_bytes >= 0, "workspace of a plan");
    explain_moe(config, tokens);
    return;
  }
  MoeConfig config = any_moe(input);
  // Eight experts of 128 x 128 are too many bytes.
  config.routing.experts = std::min(config.routing.experts, 2);
  config.local_experts = std::min(config.local_experts, 2);
  const MoeModeInfo& mode = moe_mode_info(config.mode);
  const bool is_gated = activation_info(config.activation.kind).is_gated;
  const int64_t experts = int64_t{config.local_experts} + config.routing.shared_experts;
  const int64_t rows = checked_mul(config.inter, is_gated ? 2 : 1).value_or(-1);
  MoeWeights weights;
  weights.w1 = any_weights(input, memory, mode.weights, experts, rows, config.hidden);
  weights.w2 = any_weights(input, memory, mode.weights, experts, config.hidden, config.inter);
  weights.bias1 = optional_tensor(input, memory, DType::kF32, {experts, rows});
  if (mode.input == RowFormat::kFp8Static || mode.input == RowFormat::kNvfp4) {
    weights.input_multiplier = 1.0F;
  }
  const MoeLayer layer = MoeLayer::prepare(weights, config);
  const int64_t many = input.extent();
  fuzz_require(layer.required_workspace(many) >= 0 && layer.max_rows(many) >= 0 &&
                   layer.token_tile(many) > 0,
               "size of a layer");
  const int64_t tokens = input.byte() % 4;
  MoeInputs rows_in;
  rows_in.values = tensor(input, memory, DType::kBF16, {tokens, config.hidden});
  Routing routing;
  routing.logits = tensor(input, memory, DType::kF32, {tokens, config.routing.experts});
  MoeOutputs outputs;
  outputs.out = tensor(input, memory, config.out_dtype, {tokens, config.hidden});
  outputs.slot_to_row = optional_tensor(input, memory, DType::kI32, {tokens * experts});
  const TensorView workspace =
      tensor(input, memory, DType::kU8, {layer.required_workspace(tokens)});
  layer.run(rows_in, routing, outputs, workspace);
}

}  // namespace

void fuzz_api(std::span<const uint8_t> bytes) {
  // One thread: what is judged is each call, and more would only wait for each other.
  [[maybe_unused]] static const bool kOneThread = [] {
    set_num_threads(1);
    return true;
  }();
  constexpr std::array kCalls = {fuzz_quantize, fuzz_dequantize,     fuzz_relayout, fuzz_amax,
                                 fuzz_permute,  fuzz_group_quantize, fuzz_route,    fuzz_moe};
  FuzzInput input(bytes);
  FuzzMemory memory(input);
  try {
    kCalls.at(input.byte() % kCalls.size())(input, memory);
  } catch (const Error& error) {
    fuzz_require(
        error.kind() == ErrorKind::kInvalidArgument || error.kind() == ErrorKind::kUnsupported,
        error.what());
  } catch (const TooLarge&) {  // The call is not made.
  }
}

}  // namespace narrowfloat::testing
