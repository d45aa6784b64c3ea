// A file may hold many layers: tensors with the layer's name come first. Maxima come from the first
// half of the layer, stage by stage, since a layer does not give away its intermediate. Rows are
// rounded to bf16, as the modes that are calibrated get them.
#include "bench_cli/activations.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>

#include <fmt/format.h>

#include "bench_cli/plain_math.h"
#include "cli_common/host_memory.h"
#include "narrowfloat/error.h"
#include "narrowfloat/quantize.h"
#include "narrowfloat/safetensors.h"

namespace narrowfloat::cli {
namespace {

// The tensor "layers.L.NAME" or "NAME"; nullptr if there is neither.
const TensorInfo* find_tensor(const SafetensorsReader& file, int64_t layer, std::string_view name) {
  const TensorInfo* of_layer = file.find(fmt::format("layers.{}.{}", layer, name));
  return of_layer != nullptr ? of_layer : file.find(name);
}

void check_shape(const SafetensorsReader& file, const TensorInfo& tensor, std::string_view rows,
                 int64_t cols) {
  if (tensor.shape.size() == 2 && tensor.shape[1] == cols) return;
  throw Error(ErrorKind::kCorruptData,
              fmt::format("{}: tensor '{}': expected [{}, {}] for this layer, got [{}]",
                          printable(file.path()), printable(tensor.name), rows, cols,
                          fmt::join(tensor.shape, ", ")));
}

float largest(const TensorView& values) {
  float result = 0;
  tensor_amax(values, TensorView::contiguous(&result, DType::kF32, {1}));
  return result;
}

// The ids and weights of all slots.
struct RoutedSlots {
  RoutedSlots(const LoadedMoe& layer, std::span<const float> logits)
      : tokens(static_cast<int64_t>(logits.size()) / layer.config().routing.experts),
        count(layer.config().routing.top_k + layer.config().routing.shared_experts),
        ids(static_cast<size_t>(tokens * count)),
        weights(ids.size()) {
    Routing routing;
    routing.logits = matrix_view(logits, layer.config().routing.experts);
    routing.bias = layer.router_bias();
    RouteOutputs outputs;
    outputs.ids = ids_view();
    outputs.weights = TensorView::contiguous(weights.data(), DType::kF32, {tokens, count});
    route(routing, layer.config().routing, outputs);
  }
  [[nodiscard]] TensorView ids_view() const {
    return TensorView::contiguous(ids.data(), DType::kI32, {tokens, count});
  }

  int64_t tokens;
  int64_t count;  // Slots of a token.
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

GroupedGemmArgs first_gemm(const LoadedMoe& layer, const RoutedSlots& slots) {
  const MoeConfig& config = layer.config();
  GroupedGemmArgs args;
  args.gather_tokens = true;
  args.scale = layer.weights().up_scale;
  args.gate_scale = layer.weights().gate_scale;
  if (activation_info(config.activation.kind).is_gated) args.gate_order = config.gate_order;
  args.bias = layer.weights().bias1;
  if (config.weight_on_input) {
    args.slot_weights = TensorView::contiguous(slots.weights.data(), DType::kF32,
                                               {static_cast<int64_t>(slots.weights.size())});
  }
  return args;
}

}  // namespace

std::optional<std::string> default_activations(const std::string& directory) {
  const auto path = std::filesystem::path(directory) / "calibration" / "activations.safetensors";
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return std::nullopt;
  return path.string();
}

Activations read_activations(const std::string& path, int64_t layer, const LoadedMoe& moe,
                             int64_t max_tokens) {
  const SafetensorsReader file(path);
  const TensorInfo* rows = find_tensor(file, layer, "hidden_states");
  if (rows == nullptr) {
    throw Error(ErrorKind::kCorruptData,
                fmt::format("{}: there is neither a tensor 'layers.{}.hidden_states' nor "
                            "'hidden_states'",
                            printable(path), layer));
  }
  const int64_t hidden = moe.config().hidden;
  check_shape(file, *rows, "tokens", hidden);
  Activations result;
  result.path = path;
  result.rows = read_floats(file, *rows);
  result.tokens = rows->shape[0];
  if (max_tokens > 0) result.tokens = std::min(result.tokens, max_tokens);
  result.rows.resize(static_cast<size_t>(result.tokens * hidden));
  const int64_t experts = moe.config().routing.experts;
  if (const TensorInfo* logits = find_tensor(file, layer, "router_logits")) {
    check_shape(file, *logits, "tokens", experts);
    if (logits->shape[0] != rows->shape[0]) {
      throw Error(ErrorKind::kCorruptData,
                  fmt::format("{}: hidden_states has {} rows, router_logits {}", printable(path),
                              rows->shape[0], logits->shape[0]));
    }
    result.logits = read_floats(file, *logits);
    result.logits.resize(static_cast<size_t>(result.tokens * experts));
    result.has_stored_logits = true;
  } else {
    result.logits = router_logits(moe, result.rows);
  }
  return result;
}

std::vector<float> router_logits(const LoadedMoe& moe, std::span<const float> rows) {
  const TensorView& weight = moe.router_weight();
  const int64_t experts = weight.shape[0];
  const int64_t hidden = weight.shape[1];
  PackedMatrix packed;
  packed.pack({.data = static_cast<const float*>(weight.data),
               .rows = hidden,
               .cols = experts,
               .row_stride = 1,
               .col_stride = hidden});
  const int64_t tokens = static_cast<int64_t>(rows.size()) / hidden;
  std::vector<float> logits(static_cast<size_t>(tokens * experts));
  multiply({.a = rows.data(),
            .a_stride = hidden,
            .c = logits.data(),
            .c_stride = experts,
            .rows = tokens,
            .inner = hidden,
            .cols = experts},
           packed);
  const TensorView& bias = moe.router_logit_bias();
  if (bias.is_absent()) return logits;
  const auto* values = static_cast<const float*>(bias.data);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] += values[i % static_cast<size_t>(experts)];
  return logits;
}

bool has_static_scales(MoeMode mode) {
  const RowFormat input = moe_mode_info(mode).input;
  return input == RowFormat::kFp8Static || input == RowFormat::kNvfp4;
}

void require_usable(const LayerMaxima& maxima, int64_t layer, const std::string& source) {
  const auto is_usable = [](float amax) { return amax > 0 && std::isfinite(amax); };
  if (is_usable(maxima.input) && is_usable(maxima.inter)) return;
  throw Error(ErrorKind::kInvalidArgument,
              fmt::format("{}: layer {}: static scales need rows that are finite and not all zero; "
                          "the largest input is {}, the largest intermediate {}",
                          printable(source), layer, maxima.input, maxima.inter));
}

LayerMaxima measure_maxima(const LoadedMoe& layer, std::span<const float> rows,
                           std::span<const float> logits) {
  const MoeConfig& config = layer.config();
  const std::vector<uint16_t> input = to_bf16(rows);
  const RoutedSlots slots(layer, logits);
  const int32_t local = config.local_experts + config.routing.shared_experts;
  const PermutationLayout layout = permutation_layout(
      slots.tokens, slots.count, local, default_token_tile(slots.tokens, slots.count, local));
  const AlignedBytes permutation_bytes(layout.bytes);
  GroupedGemmArgs gemm = first_gemm(layer, slots);
  gemm.permutation = layout.bind(permutation_bytes.view().data);
  permute(slots.ids_view(), config.expert_offset, local, gemm.permutation);
  gemm.a.values = matrix_view(input, config.hidden);

  const GroupedWeights w1 = GroupedWeights::prepare(layer.weights().w1, config.mode);
  std::vector<float> sums(static_cast<size_t>(layout.max_rows * w1.rows()));
  gemm.output = matrix_view(sums, w1.rows());
  const AlignedBytes workspace(grouped_gemm_workspace(w1, slots.tokens, gemm.accumulation));
  grouped_gemm(gemm, w1, workspace.view());

  // Rows without a slot stay zero: they are not written, and do not count.
  std::vector<float> inter(static_cast<size_t>(layout.max_rows * config.inter));
  ActivateArgs activation;
  activation.input.values = gemm.output;
  activation.activation = config.activation;
  activation.gate_order = config.gate_order;
  activation.slot_to_row = gemm.permutation.slot_to_row;
  if (!config.activation.alpha.values.is_absent() || !config.activation.beta.values.is_absent() ||
      !config.activation.limit_gate.values.is_absent() ||
      !config.activation.limit_up.values.is_absent()) {
    activation.tile_to_expert = gemm.permutation.tile_to_expert;
    activation.token_tile = layout.token_tile;
  }
  activation.format = RowFormat::kFp32;
  activation.output.values = matrix_view(inter, config.inter);
  activate(activation);
  return {.input = largest(gemm.a.values), .inter = largest(activation.output.values)};
}

}  // namespace narrowfloat::cli
