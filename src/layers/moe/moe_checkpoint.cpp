// LoadedMoe combines names, config and weights of one layer.
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
#include "layers/moe/router_weights.h"
#include "layers/weight_reader.h"
#include "runtime/float_environment.h"
#include "tensor/row_format.h"

namespace narrowfloat {
namespace {

// The exact mode that loses least in its activations and needs no calibration.
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

// The largest product of code and block scale in the static formats.
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

}  // namespace

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

// The state of a LoadedMoe.
struct LoadedLayer {
  MoeConfig config;
  MoeWeights weights;
  WeightFormat stored_format = WeightFormat::kBf16;
  uint64_t stored_bytes = 0;

  RouterWeights router;
  std::optional<StackedWeight> w1, w2;
  std::vector<float> up_scale, gate_scale, down_scale;
  StackedBias bias1, bias2;
};

namespace {

class LayerLoader {
 public:
  LayerLoader(const Checkpoint& checkpoint, int64_t layer, const LoadMoeOptions& options)
      : checkpoint_(checkpoint),
        options_(options),
        tensors_(recognise(checkpoint)),
        experts_(layer_experts(tensors_, layer, checkpoint.path())),
        model_(read_moe_config(checkpoint.config_text(), checkpoint.path())) {}

  void configure(LoadedLayer& state) {
    MoeConfig& config = state.config;
    config.routing = model_.routing;
    config.activation = model_.activation;
    config.weight_on_input = model_.weight_on_input;
    config.gate_order = GateOrder::kGateUp;
    if (experts_.is_stacked()) {
      configure_stacked(config);
    } else {
      configure_single(config);
    }
    config.expert_offset = options_.expert_offset;
    config.local_experts = local_experts();
    if (!options_.places.empty()) {  // The caller routes: a router knows experts, not places.
      config.routing.experts = num_places();
      config.routing.n_group = config.routing.topk_group = 1;
    }
    const std::optional<Convention> convention = first_weight().convention;
    state.stored_format = convention ? weight_format(*convention) : WeightFormat::kBf16;
    config.mode = options_.mode.value_or(default_mode(state.stored_format));
    check_extents(config);
    inter_ = config.inter;
    part_ = tensor_shard(inter_, config.mode, options_.tensor_rank, options_.tensor_ranks);
    config.inter = part_.count;
    config.add_fc2_bias = options_.tensor_rank == 0;
  }

  void load(LoadedLayer& state) {
    const MoeConfig& config = state.config;
    const WeightFormat format = moe_mode_info(config.mode).weights;
    state.w1.emplace(format, config.local_experts, 2 * config.inter, config.hidden);
    state.w2.emplace(format, config.local_experts, config.hidden, config.inter);
    state.bias1.rows = 2 * config.inter;
    state.bias2.rows = config.hidden;
    if (experts_.is_stacked()) {
      load_stacked(state);
    } else {
      load_single(state);
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

  void load_router(LoadedLayer& state) const {
    state.router = read_router(checkpoint_, experts_.block, model_, state.config.hidden);
  }

 private:
  [[nodiscard]] const LogicalTensor& first_weight() const {
    return experts_.is_stacked() ? *experts_.stacked[0] : *experts_.experts[0][0];
  }

  void configure_single(MoeConfig& config) const {
    const LogicalTensor& gate = *experts_.experts[0][0];
    check_expert_count(static_cast<int64_t>(experts_.experts.size()));
    if (gate.shape.size() != 2) {
      throw_error(ErrorKind::kCorruptData, "{}: tensor '{}': expected a matrix, got {} axes",
                  printable(checkpoint_.path()), printable(gate.name), gate.shape.size());
    }
    config.hidden = gate.shape.at(1);
    config.inter = gate.shape.at(0);
  }

  void configure_stacked(MoeConfig& config) const {
    if (!model_.stacked_order) {
      throw_error(ErrorKind::kUnsupported,
                  "{}: tensor '{}': stacked experts are read of the model types gpt_oss and "
                  "llama4_text, whose order of rows is known; split them into experts",
                  printable(checkpoint_.path()), printable(first_weight().name));
    }
    config.gate_order = *model_.stacked_order;
    const CodeMatrix w1 = stacked_matrix(*experts_.stacked[0]);
    const CodeMatrix w2 = stacked_matrix(*experts_.stacked[1]);
    check_expert_count(w1.experts);
    const bool fit = w1.experts == w2.experts && w1.rows % 2 == 0 && w1.rows / 2 == w2.cols &&
                     w1.cols == w2.rows;
    if (!fit) {
      throw_error(ErrorKind::kCorruptData,
                  "{}: '{}' and '{}' do not fit together: {} experts of {} x {}, and {} of {} x {}",
                  printable(checkpoint_.path()), printable(experts_.stacked[0]->name),
                  printable(experts_.stacked[1]->name), w1.experts, w1.rows, w1.cols, w2.experts,
                  w2.rows, w2.cols);
    }
    config.hidden = w1.cols;
    config.inter = w2.cols;
  }

  static bool is_transposed(const LogicalTensor& weight) {
    return weight.convention ? weight.is_transposed
                             : parse_stacked_name(weight.name)->is_transposed;
  }

  [[nodiscard]] CodeMatrix stacked_matrix(const LogicalTensor& weight) const {
    if (weight.shape.size() != 3) {
      throw_error(ErrorKind::kCorruptData,
                  "{}: tensor '{}': expected matrices of all experts, got {} axes",
                  printable(checkpoint_.path()), printable(weight.name), weight.shape.size());
    }
    CodeMatrix matrix{.experts = weight.shape[0], .rows = weight.shape[1], .cols = weight.shape[2]};
    if (is_transposed(weight)) std::swap(matrix.rows, matrix.cols);
    return matrix;
  }

  void load_single(LoadedLayer& state) const {
    const MoeConfig& config = state.config;
    ExpertLoader w1(checkpoint_, *state.w1);
    ExpertLoader w2(checkpoint_, *state.w2);
    for (int32_t expert = 0; expert < config.local_experts; ++expert) {
      const int64_t id = expert_at(config.expert_offset + expert);
      const auto& matrices = experts_.experts[static_cast<size_t>(id)];
      const std::vector<int64_t> first{inter_, config.hidden};
      const MatrixPart rows{.rows = {{part_.offset, part_.count}}};
      state.gate_scale.push_back(w1.load(*matrices[0], first, rows, expert, 0));
      state.up_scale.push_back(w1.load(*matrices[1], first, rows, expert, config.inter));
      state.down_scale.push_back(
          w2.load(*matrices[2], {config.hidden, inter_}, second_part(config), expert, 0));
      const int64_t gate_row = expert * state.bias1.rows;
      load_bias(*matrices[0], rows.rows[0], gate_row, state.bias1, state);
      load_bias(*matrices[1], rows.rows[0], gate_row + config.inter, state.bias1, state);
      if (!config.add_fc2_bias) continue;
      load_bias(*matrices[2], {0, config.hidden}, expert * state.bias2.rows, state.bias2, state);
    }
    state.stored_bytes += w1.loaded_bytes() + w2.loaded_bytes();
  }

  // All rows of the second matrix, and the shard's columns.
  [[nodiscard]] MatrixPart second_part(const MoeConfig& config) const {
    return {.rows = {{0, config.hidden}}, .first_col = part_.offset};
  }

  // The shard's rows of a stacked first matrix.
  [[nodiscard]] MatrixPart first_part(const MoeConfig& config) const {
    const bool is_together = config.gate_order == GateOrder::kInterleaved || part_.count == inter_;
    if (is_together) return {.rows = {{2 * part_.offset, 2 * part_.count}}};
    return {.rows = {{part_.offset, part_.count}, {inter_ + part_.offset, part_.count}}};
  }

  void load_stacked(LoadedLayer& state) const {
    const MoeConfig& config = state.config;
    const StackedSource first{*experts_.stacked[0], is_transposed(*experts_.stacked[0]), 2 * inter_,
                              config.hidden};
    const StackedSource second{*experts_.stacked[1], is_transposed(*experts_.stacked[1]),
                               config.hidden, inter_};
    ExpertLoader w1(checkpoint_, *state.w1);
    ExpertLoader w2(checkpoint_, *state.w2);
    for (int32_t expert = 0; expert < config.local_experts; ++expert) {
      const int64_t id = expert_at(config.expert_offset + expert);
      const float scale = w1.load_stacked(first, first_part(config), id, expert);
      state.gate_scale.push_back(scale);
      state.up_scale.push_back(scale);
      state.down_scale.push_back(w2.load_stacked(second, second_part(config), id, expert));
    }
    state.stored_bytes += w1.loaded_bytes() + w2.loaded_bytes();
    load_stacked_bias(first, first_part(config).rows, state.bias1, state);
    if (!config.add_fc2_bias) return;
    load_stacked_bias(second, second_part(config).rows, state.bias2, state);
  }

  // The local experts' ranges of a bias [E, rows].
  void load_stacked_bias(const StackedSource& source, const std::vector<MatrixRows>& ranges,
                         StackedBias& target, LoadedLayer& state) const {
    const MoeConfig& config = state.config;
    const CheckpointTensor* tensor = checkpoint_.find(stacked_bias_name(source.weight.name));
    if (tensor == nullptr) return;
    require_shape(checkpoint_, *tensor, {model_.routing.experts, source.rows});
    for (int32_t expert = 0; expert < config.local_experts; ++expert) {
      const int64_t id = expert_at(config.expert_offset + expert);
      for (const MatrixRows& range : ranges) {
        const std::vector<float> values =
            read_plain_f32(checkpoint_, *tensor, id * source.rows + range.first, range.count);
        target.values.insert(target.values.end(), values.begin(), values.end());
      }
    }
    state.stored_bytes +=
        target.values.size() * static_cast<uint64_t>(bits(tensor->info.dtype)) / 8;
  }

  // A range of "....gate_proj.bias" beside "....gate_proj.weight", to row `first` of the stacked
  // bias.
  void load_bias(const LogicalTensor& weight, const MatrixRows& range, int64_t first,
                 StackedBias& target, LoadedLayer& state) const {
    constexpr std::string_view kWeight = "weight";
    const std::string stem = weight.name.substr(0, weight.name.size() - kWeight.size());
    const CheckpointTensor* tensor = checkpoint_.find(stem + "bias");
    if (tensor == nullptr) return;
    require_shape(checkpoint_, *tensor, {weight.shape.at(0)});
    const std::vector<float> values =
        read_plain_f32(checkpoint_, *tensor, range.first, range.count);
    target.values.resize(static_cast<size_t>(state.config.local_experts * target.rows));
    std::copy(values.begin(), values.end(), target.values.begin() + first);
    state.stored_bytes += values.size() * static_cast<uint64_t>(bits(tensor->info.dtype)) / 8;
  }

  void check_expert_count(int64_t experts) const {
    if (model_.routing.experts == experts && experts > 0) return;
    throw_error(ErrorKind::kCorruptData, "{}: {} has experts 0 to {}, config.json declares {}",
                printable(checkpoint_.path()), printable(experts_.block), experts - 1,
                model_.routing.experts);
  }

  // Refuses extents that prepare() would refuse, before any buffer is sized.
  void check_extents(const MoeConfig& config) const {
    const MoeModeInfo& mode = moe_mode_info(config.mode);
    if (config.hidden % mode.multiple == 0 && config.inter % mode.multiple == 0) return;
    throw_invalid(
        "mode: {} needs hidden and intermediate sizes that are multiples of {}, got {} "
        "and {}",
        mode.name, mode.multiple, config.hidden, config.inter);
  }

  // The number of places, which is that of experts unless the caller gives some.
  [[nodiscard]] int32_t num_places() const {
    return options_.places.empty() ? model_.routing.experts
                                   : static_cast<int32_t>(options_.places.size());
  }
  [[nodiscard]] int64_t expert_at(int32_t place) const {
    return options_.places.empty() ? place : options_.places[static_cast<size_t>(place)];
  }

  [[nodiscard]] int32_t local_experts() const {
    for (const int32_t expert : options_.places) {
      if (expert >= 0 && expert < model_.routing.experts) continue;
      throw_invalid("option places: expected experts from 0 to {}, got {}",
                    model_.routing.experts - 1, expert);
    }
    const int32_t experts = num_places();
    const int32_t count = options_.local_experts.value_or(experts - options_.expert_offset);
    if (options_.expert_offset < 0 || count < 1 || options_.expert_offset > experts - count) {
      throw_invalid(
          "option local_experts: the shard must lie within the {} {}, got {} from number {} on",
          experts, options_.places.empty() ? "experts" : "places", count, options_.expert_offset);
    }
    return count;
  }

  // Static quant multipliers of input and intermediate. The multiplier of the first GEMM's rows is
  // divided out by its factors.
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
  int64_t inter_ = 0;  // All tensor ranks' columns.
  TensorShard part_;
};

}  // namespace

struct LoadedMoe::State : LoadedLayer {};

TensorShard tensor_shard(int64_t inter, MoeMode mode, int rank, int ranks) {
  const MoeModeInfo& info = moe_mode_info(mode);
  if (inter < 1 || inter % info.multiple != 0) {
    throw_invalid("inter: mode {} needs a positive multiple of {}, got {}", info.name,
                  info.multiple, inter);
  }
  const int64_t units = inter / info.multiple;
  if (ranks < 1 || units % ranks != 0) {
    std::vector<int64_t> counts;
    for (int64_t count = 1; count <= units; ++count) {
      if (units % count == 0) counts.push_back(count);
    }
    throw_invalid(
        "tensor_ranks: mode {} cuts an intermediate of {} at multiples of {}; expected one of {} "
        "ranks, got {}",
        info.name, inter, info.multiple, fmt::join(counts, ", "), ranks);
  }
  if (rank < 0 || rank >= ranks) {
    throw_invalid("tensor_rank: expected 0 to {}, got {}", ranks - 1, rank);
  }
  return {.offset = inter / ranks * rank, .count = inter / ranks};
}

std::vector<int64_t> moe_layers(const Checkpoint& checkpoint) {
  const std::set<int64_t> layers = layers_with_experts(recognise(checkpoint));
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
const TensorView& LoadedMoe::router_weight() const { return state_->router.weight.view; }
const TensorView& LoadedMoe::router_logit_bias() const { return state_->router.logit_bias.view; }
const TensorView& LoadedMoe::router_bias() const { return state_->router.correction_bias.view; }

}  // namespace narrowfloat
