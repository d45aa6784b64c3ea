// LoadedMoe: names, config and weights of one layer put together.
#include "narrowfloat/moe_checkpoint.h"

#include <algorithm>
#include <set>
#include <utility>

#include <fmt/ranges.h>

#include "base/bad_enumerator.h"
#include "base/throw_error.h"
#include "checkpoint/escape.h"
#include "layers/moe/expert_loader.h"
#include "layers/moe/expert_names.h"
#include "layers/moe/model_config.h"
#include "runtime/float_environment.h"
#include "tensor/element_io.h"
#include "tensor/row_format.h"

namespace narrowfloat {
namespace {

// The exact mode with the least loss in its activations that needs no calibration.
MoeMode default_mode(WeightFormat stored) {
  switch (stored) {
    case WeightFormat::kBf16:
    case WeightFormat::kFp8Tensor:
      return MoeMode::kBf16;
    case WeightFormat::kFp8Block:
      return MoeMode::kFp8Block;
    case WeightFormat::kMxfp8:
      return MoeMode::kMxfp8;
    case WeightFormat::kMxfp4:
      return MoeMode::kMxfp4Bf16;
    case WeightFormat::kNvfp4:
      return MoeMode::kNvfp4Bf16;
  }
  throw_bad_enumerator("weight format", static_cast<int>(stored));
}

// Largest value that codes and block scales of the static formats reach together.
float static_range(RowFormat format) {
  return format == RowFormat::kNvfp4 ? 448.0F * 6.0F : 448.0F;
}

float static_multiplier(std::string_view option, const std::optional<float>& amax,
                        RowFormat format) {
  if (!amax) {
    throw_invalid("option {}: a mode with static scales needs the largest magnitude that was seen",
                  option);
  }
  if (!(*amax > 0.0F && *amax < __builtin_inff())) {
    throw_invalid("option {}: expected a finite number above 0, got {}", option, *amax);
  }
  return in_float_environment([&] { return static_range(format) / *amax; });
}

std::vector<float> read_plain_f32(const Checkpoint& checkpoint, const CheckpointTensor& tensor) {
  const DType dtype = tensor.info.dtype;
  if (dtype != DType::kF32 && dtype != DType::kBF16 && dtype != DType::kF16) {
    throw_error(ErrorKind::kUnsupported, "{}: tensor '{}': expected F32, BF16 or F16, got {}",
                printable(checkpoint.path()), printable(tensor.info.name), name(dtype));
  }
  std::vector<std::byte> bytes(tensor.info.size_bytes);
  checkpoint.read(tensor, 0, bytes);
  std::vector<float> result(static_cast<size_t>(tensor.info.num_elements()));
  widen(dtype, bytes.data(), tensor.info.num_elements(), result.data());
  return result;
}

// Biases of all experts, those without one zero.
struct StackedBias {
  int64_t rows = 0;
  std::vector<float> values;  // [experts, rows]; empty where no expert has one.

  [[nodiscard]] TensorView view() const {
    if (values.empty()) return {};
    const int64_t experts = static_cast<int64_t>(values.size()) / rows;
    return TensorView::contiguous(values.data(), DType::kF32, {experts, rows});
  }
};

struct LoadedLayer {
  MoeConfig config;
  MoeWeights weights;
  WeightFormat stored_format = WeightFormat::kBf16;
  uint64_t stored_bytes = 0;
  TensorView router_weight_view;
  TensorView router_bias_view;

  std::vector<float> router_weight;
  std::vector<float> router_bias;
  std::optional<StackedWeight> w1, w2;
  std::vector<float> up_scale, gate_scale, down_scale;
  StackedBias bias1, bias2;
};

class LayerLoader {
 public:
  LayerLoader(const Checkpoint& checkpoint, int64_t layer, const LoadMoeOptions& options)
      : checkpoint_(checkpoint),
        options_(options),
        tensors_(recognise(checkpoint)),
        experts_(layer_experts(tensors_, layer, checkpoint.path())),
        model_(read_moe_config(checkpoint.config_text(), checkpoint.path())) {}

  void configure(LoadedLayer& state) {
    const LogicalTensor& gate = *experts_.experts[0][0];
    MoeConfig& config = state.config;
    config.routing = model_.routing;
    config.activation = model_.activation;
    config.gate_order = GateOrder::kGateUp;
    check_expert_count();
    if (gate.shape.size() != 2) {
      throw_error(ErrorKind::kCorruptData, "{}: tensor '{}': expected a matrix, got {} axes",
                  printable(checkpoint_.path()), printable(gate.name), gate.shape.size());
    }
    config.hidden = gate.shape.at(1);
    config.inter = gate.shape.at(0);
    config.expert_offset = options_.expert_offset;
    config.local_experts = local_experts();
    state.stored_format = gate.convention ? weight_format(*gate.convention) : WeightFormat::kBf16;
    config.mode = options_.mode.value_or(default_mode(state.stored_format));
    check_extents(config);
  }

  void load(LoadedLayer& state) {
    const MoeConfig& config = state.config;
    const WeightFormat format = moe_mode_info(config.mode).weights;
    state.w1.emplace(format, config.local_experts, 2 * config.inter, config.hidden);
    state.w2.emplace(format, config.local_experts, config.hidden, config.inter);
    state.bias1.rows = 2 * config.inter;
    state.bias2.rows = config.hidden;
    ExpertLoader w1(checkpoint_, *state.w1);
    ExpertLoader w2(checkpoint_, *state.w2);
    for (int32_t expert = 0; expert < config.local_experts; ++expert) {
      const int64_t id = int64_t{config.expert_offset} + expert;
      const auto& matrices = experts_.experts[static_cast<size_t>(id)];
      state.gate_scale.push_back(w1.load(*matrices[0], expert, 0, config.inter));
      state.up_scale.push_back(w1.load(*matrices[1], expert, config.inter, config.inter));
      state.down_scale.push_back(w2.load(*matrices[2], expert, 0, config.hidden));
      const int64_t gate_row = expert * state.bias1.rows;
      load_bias(*matrices[0], gate_row, state.bias1, state);
      load_bias(*matrices[1], gate_row + config.inter, state.bias1, state);
      load_bias(*matrices[2], expert * state.bias2.rows, state.bias2, state);
      for (const LogicalTensor* matrix : matrices) state.stored_bytes += matrix->size_bytes;
    }
    state.weights.bias1 = state.bias1.view();
    state.weights.bias2 = state.bias2.view();
    fold_static_scales(state);
    const auto each = [&](std::vector<float>& values) {
      return PerExpert(TensorView::contiguous(values.data(), DType::kF32, {config.local_experts}));
    };
    state.weights.w1 = state.w1->view();
    state.weights.w2 = state.w2->view();
    state.weights.gate_scale = each(state.gate_scale);
    state.weights.up_scale = each(state.up_scale);
    state.weights.down_scale = each(state.down_scale);
  }

  void load_router(LoadedLayer& state) {
    const int64_t experts = state.config.routing.experts;
    const std::string stem = experts_.block + ".gate.";
    const CheckpointTensor* weight = checkpoint_.find(stem + "weight");
    if (weight == nullptr || weight->info.shape != std::vector{experts, state.config.hidden}) {
      throw_error(ErrorKind::kCorruptData, "{}: expected the router '{}weight' with shape [{}, {}]",
                  printable(checkpoint_.path()), printable(stem), experts, state.config.hidden);
    }
    state.router_weight = read_plain_f32(checkpoint_, *weight);
    state.router_weight_view = TensorView::contiguous(state.router_weight.data(), DType::kF32,
                                                      {experts, state.config.hidden});
    if (state.config.routing.method != RoutingMethod::kDeepSeekV3) return;
    const CheckpointTensor* bias = checkpoint_.find(stem + "e_score_correction_bias");
    if (bias == nullptr) {
      throw_error(ErrorKind::kCorruptData, "{}: expected the router's '{}e_score_correction_bias'",
                  printable(checkpoint_.path()), printable(stem));
    }
    require_shape(*bias, {experts});
    state.router_bias = read_plain_f32(checkpoint_, *bias);
    state.router_bias_view =
        TensorView::contiguous(state.router_bias.data(), DType::kF32, {bias->info.num_elements()});
  }

 private:
  void require_shape(const CheckpointTensor& tensor, const std::vector<int64_t>& shape) const {
    if (tensor.info.shape == shape) return;
    throw_error(ErrorKind::kCorruptData, "{}: tensor '{}': expected shape [{}], got [{}]",
                printable(checkpoint_.path()), printable(tensor.info.name), fmt::join(shape, ", "),
                fmt::join(tensor.info.shape, ", "));
  }

  // "....gate_proj.bias" beside "....gate_proj.weight", to row `first` of the stacked bias.
  void load_bias(const LogicalTensor& weight, int64_t first, StackedBias& target,
                 LoadedLayer& state) const {
    constexpr std::string_view kWeight = "weight";
    const std::string stem = weight.name.substr(0, weight.name.size() - kWeight.size());
    const CheckpointTensor* tensor = checkpoint_.find(stem + "bias");
    if (tensor == nullptr) return;
    require_shape(*tensor, {weight.shape.at(0)});
    const std::vector<float> values = read_plain_f32(checkpoint_, *tensor);
    target.values.resize(static_cast<size_t>(state.config.local_experts * target.rows));
    std::copy(values.begin(), values.end(), target.values.begin() + first);
    state.stored_bytes += tensor->info.size_bytes;
  }

  void check_expert_count() const {
    if (static_cast<size_t>(model_.routing.experts) != experts_.experts.size()) {
      throw_error(ErrorKind::kCorruptData, "{}: {} has experts 0 to {}, config.json declares {}",
                  printable(checkpoint_.path()), printable(experts_.block),
                  experts_.experts.size() - 1, model_.routing.experts);
    }
  }

  // Before any buffer is sized: what prepare() would refuse.
  void check_extents(const MoeConfig& config) const {
    const MoeModeInfo& mode = moe_mode_info(config.mode);
    if (config.hidden % mode.multiple == 0 && config.inter % mode.multiple == 0) return;
    throw_invalid(
        "mode: {} needs hidden and intermediate sizes that are multiples of {}, got {} "
        "and {}",
        mode.name, mode.multiple, config.hidden, config.inter);
  }

  [[nodiscard]] int32_t local_experts() const {
    const auto experts = static_cast<int32_t>(experts_.experts.size());
    const int32_t count = options_.local_experts.value_or(experts - options_.expert_offset);
    if (options_.expert_offset < 0 || count < 1 || options_.expert_offset > experts - count) {
      throw_invalid(
          "option local_experts: the shard must lie within the {} experts, got {} from "
          "expert {} on",
          experts, count, options_.expert_offset);
    }
    return count;
  }

  // Static quant multipliers of input and intermediate: what the first multiplies by, the factors
  // of the GEMM divide by.
  void fold_static_scales(LoadedLayer& state) const {
    const MoeModeInfo& mode = moe_mode_info(state.config.mode);
    if (!has_static_multiplier(mode.input)) return;
    const float input = static_multiplier("input_amax", options_.input_amax, mode.input);
    const float inter = static_multiplier("inter_amax", options_.inter_amax, mode.intermediate);
    in_float_environment([&] {
      for (float& scale : state.gate_scale) scale /= input;
      for (float& scale : state.up_scale) scale /= input;
      for (float& scale : state.down_scale) scale /= inter;
      return 0;
    });
    state.weights.input_multiplier = input;
    state.weights.inter_multiplier = inter;
  }

  const Checkpoint& checkpoint_;
  const LoadMoeOptions& options_;
  std::vector<LogicalTensor> tensors_;
  LayerExperts experts_;
  MoeModelConfig model_;
};

}  // namespace

struct LoadedMoe::State : LoadedLayer {};

std::vector<int64_t> moe_layers(const Checkpoint& checkpoint) {
  std::set<int64_t> layers;
  for (const LogicalTensor& tensor : recognise(checkpoint)) {
    if (const auto parsed = parse_expert_name(tensor.name)) layers.insert(parsed->layer);
  }
  return {layers.begin(), layers.end()};
}

LoadedMoe::LoadedMoe(const Checkpoint& checkpoint, int64_t layer, const LoadMoeOptions& options) {
  auto state = std::make_shared<State>();
  LayerLoader loader(checkpoint, layer, options);
  loader.configure(*state);
  loader.load(*state);
  loader.load_router(*state);
  state_ = std::move(state);
}

const MoeConfig& LoadedMoe::config() const { return state_->config; }
const MoeWeights& LoadedMoe::weights() const { return state_->weights; }
WeightFormat LoadedMoe::stored_format() const { return state_->stored_format; }
uint64_t LoadedMoe::stored_bytes() const { return state_->stored_bytes; }
const TensorView& LoadedMoe::router_weight() const { return state_->router_weight_view; }
const TensorView& LoadedMoe::router_bias() const { return state_->router_bias_view; }

}  // namespace narrowfloat
