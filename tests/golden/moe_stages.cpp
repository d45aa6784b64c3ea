// See moe_stages.h.
#include "golden/moe_stages.h"

#include <algorithm>
#include <array>

namespace narrowfloat::testing {
namespace {

constexpr int64_t kAlignment = 256;

TensorView flat(const TensorView& view) {
  return TensorView::contiguous(view.data, view.dtype, {view.num_elements()});
}

bool has_per_expert(const ActivateArgs& args) {
  const Activation& a = args.activation;
  const std::array all{&a.alpha, &a.beta, &a.limit_gate, &a.limit_up, &args.multiplier};
  return std::any_of(all.begin(), all.end(),
                     [](const PerExpert* each) { return !each->values.is_absent(); });
}

}  // namespace

AlignedBytes::AlignedBytes(int64_t size)
    : size_(size), bytes_(static_cast<size_t>(size + kAlignment), 0xFF) {}

TensorView AlignedBytes::view() const {
  const auto address = reinterpret_cast<uintptr_t>(bytes_.data());
  const uintptr_t gap = (kAlignment - address % kAlignment) % kAlignment;
  return TensorView::contiguous(bytes_.data() + gap, DType::kU8, {size_});
}

OwnedPermutation::OwnedPermutation(const PermutationLayout& layout)
    : token_tile(layout.token_tile) {
  const auto integers = [](int64_t count) { return OwnedTensor(DType::kI32, {count}, 0xCC); };
  slot_to_row = integers(layout.tokens * layout.slots);
  row_to_token = integers(layout.max_rows);
  row_to_slot = integers(layout.max_rows);
  num_rows = integers(1);
  tile_to_expert = integers(layout.max_tiles);
  tile_row_end = integers(layout.max_tiles);
  num_tiles = integers(1);
}

Permutation OwnedPermutation::view() const {
  return {.token_tile = token_tile,
          .slot_to_row = slot_to_row.view(),
          .row_to_token = row_to_token.view(),
          .row_to_slot = row_to_slot.view(),
          .num_rows = num_rows.view(),
          .tile_to_expert = tile_to_expert.view(),
          .tile_row_end = tile_row_end.view(),
          .num_tiles = num_tiles.view()};
}

std::vector<int64_t> OwnedPermutation::local_rows() const {
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < slot_to_row.count(); ++i) {
    if (slot_to_row.at(i) >= 0) rows.push_back(static_cast<int64_t>(slot_to_row.at(i)));
  }
  return rows;
}

MoeStages::MoeStages(const MoeGoldenCase& given, Accumulation accumulation)
    : given_(given),
      config_(given.config()),
      accumulation_(accumulation),
      tokens_(given.plan().at("tokens").get<int64_t>()),
      slots_(config_.routing.top_k + config_.routing.shared_experts) {}

void MoeStages::route_tokens() {
  ids = OwnedTensor(DType::kI32, {tokens_, slots_}, 0xFF);
  weights = OwnedTensor(DType::kF32, {tokens_, slots_}, 0xFF);
  RouteOutputs outputs;
  outputs.ids = ids.view();
  outputs.weights = weights.view();
  route(given_.routing(), config_.routing, outputs);
}

void MoeStages::permute_slots() {
  const int32_t experts = given_.weight_experts();
  const auto layout = permutation_layout(tokens_, slots_, experts, config_.token_tile.value());
  max_rows_ = layout.max_rows;
  maps = OwnedPermutation(layout);
  permute(ids.view(), config_.expert_offset, experts, maps.view());
}

std::vector<int64_t> MoeStages::slots_of_rows() const {
  std::vector<int64_t> source(static_cast<size_t>(max_rows_), -1);
  const std::vector<int64_t> rows = maps.local_rows();
  for (size_t i = 0; i < rows.size(); ++i) source[static_cast<size_t>(rows[i])] = int64_t(i);
  return source;
}

void MoeStages::multiply(GroupedGemmArgs args, const GroupedWeights& weights_of) const {
  args.permutation = maps.view();
  args.accumulation = accumulation_;
  const int64_t a_rows = args.a.values.shape[0];
  const AlignedBytes workspace(grouped_gemm_workspace(weights_of, a_rows, accumulation_));
  grouped_gemm(args, weights_of, workspace.view());
}

void MoeStages::multiply_first() {
  const MoeWeights& given = given_.weights();
  const auto prepared = GroupedWeights::prepare(given.w1, config_.mode);
  const bool is_fp64 = accumulation_ == Accumulation::kFp64;
  fc1_rows_ = OwnedTensor(is_fp64 ? DType::kF64 : DType::kF32, {max_rows_, prepared.rows()}, 0xFF);
  GroupedGemmArgs args;
  args.a = given_.inputs();
  args.gather_tokens = true;
  if (config_.weight_on_input) args.slot_weights = flat(weights.view());
  args.scale = given.up_scale;
  if (activation_info(config_.activation.kind).is_gated) {
    args.gate_order = config_.gate_order;
    args.gate_scale = given.gate_scale;
  }
  args.bias = given.bias1;
  args.output = fc1_rows_.view();
  multiply(args, prepared);
  fc1 = fc1_rows_.gathered(maps.local_rows());
}

void MoeStages::activate_rows() {
  // The golden rows tell the types; every row of the output is 0xFF bytes.
  const std::vector<int64_t> nothing(static_cast<size_t>(max_rows_), -1);
  OwnedTensor rows = given_.tensor("h").gathered(nothing);
  OwnedTensor scales;
  OwnedTensor row_scale;
  ActivateArgs args;
  args.input.values = fc1_rows_.view();
  args.activation = config_.activation;
  args.gate_order = config_.gate_order;
  args.slot_to_row = maps.slot_to_row.view();
  args.format = given_.intermediate();
  args.multiplier = given_.weights().inter_multiplier;
  if (has_per_expert(args)) {
    args.tile_to_expert = maps.tile_to_expert.view();
    args.token_tile = config_.token_tile.value();
  }
  args.output.values = rows.view();
  if (given_.has("h_scales")) {
    scales = given_.tensor("h_scales").gathered(nothing);
    args.output.scales = scales.view();
  }
  if (given_.has("h_row_scale")) {
    row_scale = given_.tensor("h_row_scale").gathered(nothing);
    args.output.row_scale = row_scale.view();
  }
  activate(args);
  h = rows.gathered(maps.local_rows());
  if (!scales.shape.empty()) h_scales = scales.gathered(maps.local_rows());
  if (!row_scale.shape.empty()) h_row_scale = row_scale.gathered(maps.local_rows());
}

void MoeStages::multiply_second() {
  const MoeWeights& given = given_.weights();
  const std::vector<int64_t> source = slots_of_rows();
  const OwnedTensor rows = given_.tensor("h").gathered(source);
  OwnedTensor scales;
  OwnedTensor row_scale;
  GroupedGemmArgs args;
  args.a.values = rows.view();
  if (given_.has("h_scales")) {
    scales = given_.tensor("h_scales").gathered(source);
    args.a.scales = scales.view();
  }
  if (given_.has("h_row_scale")) {
    row_scale = given_.tensor("h_row_scale").gathered(source);
    args.a.row_scale = row_scale.view();
  }
  args.scale = given.down_scale;
  if (config_.add_fc2_bias) args.bias = given.bias2;
  const OwnedTensor result(config_.slot_dtype, {max_rows_, config_.hidden}, 0xFF);
  args.output = result.view();
  multiply(args, GroupedWeights::prepare(given.w2, config_.mode));
  y = result.gathered(maps.local_rows());
}

void MoeStages::combine_slots() {
  const OwnedTensor rows = given_.tensor("y").gathered(slots_of_rows());
  OwnedTensor golden_weights(DType::kF32, {tokens_, slots_}, 0);
  const OwnedTensor& kept = given_.tensor("expert_weights");
  std::copy_n(kept.bytes.begin(), golden_weights.bytes.size(), golden_weights.bytes.begin());
  out = OwnedTensor(config_.out_dtype, given_.tensor("out").shape, 0xFF);
  combine(rows.view(), maps.slot_to_row.view(),
          config_.weight_on_input ? TensorView{} : golden_weights.view(), out.view());
}

}  // namespace narrowfloat::testing
