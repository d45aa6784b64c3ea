// See moe_run.h.
#include "layers/moe/moe_run.h"

#include "moe_shared/quantize_activations.h"
#include "ops/combine/combine_problem.h"
#include "ops/grouped_gemm/grouped_gemm_problem.h"
#include "ops/permute/permute_problem.h"

namespace narrowfloat {
namespace {

// Rows that can be computed without seeing whole rows.
DequantizedRows without_factors(const DequantizedRows& rows) {
  return rows.factors == nullptr ? rows : DequantizedRows{};
}

// Quantizers of whole rows trigger before their wait. Those of groups do so after it, but what they
// would complete nobody reads early.
KernelChain::Trigger trigger_of(MoePlanStageKind kind) {
  switch (kind) {
    case MoePlanStageKind::kQuantizeInput:
    case MoePlanStageKind::kQuantizeIntermediate:
    case MoePlanStageKind::kCombine:
      return KernelChain::Trigger::kBeforeWait;
    default:
      return KernelChain::Trigger::kAfterWait;
  }
}

}  // namespace

MoeRun::MoeRun(const PreparedMoe& layer, const MoePlan& plan, const MoeCall& call, Stream stream)
    : layer_(layer), plan_(plan), call_(call), stream_(stream), input_(call.inputs) {
  const MoeOutputs& outputs = call.outputs;
  ids_ = output_or(outputs.topk_ids, MoeBufferId::kIds, DType::kI32);
  weights_ = output_or(outputs.expert_weights, MoeBufferId::kWeights, DType::kF32);
  permutation_ = plan.permutation().bind(at(MoeBufferId::kPermutation), layer.device);
  if (!outputs.slot_to_row.is_absent()) permutation_.slot_to_row = outputs.slot_to_row;
  const int64_t max_rows = plan.permutation().max_rows;
  const MoeExtents& extents = layer.extents;
  std::byte* gemm_rows = at(MoeBufferId::kGemmRows);
  fc1_ =
      plan.fuses_activation()
          ? TensorView::contiguous(gemm_rows, DType::kBF16, {max_rows, extents.inter}, layer.device)
          : TensorView::contiguous(gemm_rows, extents.fc1_dtype(), {max_rows, extents.fc1_rows},
                                   layer.device);
  fc1_quantized_ = plan.fc1_rows().bind(at(MoeBufferId::kFc1Rows), max_rows, layer.device);
  intermediate_ =
      plan.intermediate_rows().bind(at(MoeBufferId::kIntermediateRows), max_rows, layer.device);
  slot_rows_ = outputs.slot_out;
  if (slot_rows_.is_absent()) {
    slot_rows_ = TensorView::contiguous(gemm_rows, extents.slot_dtype, {max_rows, extents.hidden},
                                        layer.device);
  }
  MoeCallFacts facts{.quantizes_input = quantizes_input(call, layer.config)};
  if (layer.device.type != DeviceType::kCpu) {
    route_permute_ = route_permute_args();
    facts.joins_routing = joins_routing(route_permute_problem(route_permute_));
  }
  plan_.list_stages(facts);
}

std::byte* MoeRun::at(MoeBufferId id) const {
  return static_cast<std::byte*>(call_.workspace.data) + plan_.buffer(id).offset;
}

TensorView MoeRun::scratch(MoeBufferId id) const {
  return TensorView::contiguous(at(id), DType::kU8, {plan_.buffer(id).bytes}, layer_.device);
}

TensorView MoeRun::output_or(const TensorView& requested, MoeBufferId id, DType dtype) const {
  if (!requested.is_absent()) return requested;
  return TensorView::contiguous(at(id), dtype, {call_.tokens, layer_.extents.slots}, layer_.device);
}

void MoeRun::run(MoeStage last) {
  for (const MoePlanStage& stage : plan_.stages()) {
    if (stage.first > last) return;
    run_stage(stage.kind);
    chain_.append(stage.writes, trigger_of(stage.kind));
  }
}

void MoeRun::run_stage(MoePlanStageKind kind) {
  switch (kind) {
    case MoePlanStageKind::kRoutePermute:
      return route_and_permute_slots();
    case MoePlanStageKind::kRoute:
      return route_tokens();
    case MoePlanStageKind::kPermute:
      return permute_slots();
    case MoePlanStageKind::kQuantizeInput:
      return quantize_input();
    case MoePlanStageKind::kFirstGemm:
      return multiply_first();
    case MoePlanStageKind::kQuantizeFc1:
      return quantize_fc1();
    case MoePlanStageKind::kActivation:
      return activate_rows();
    case MoePlanStageKind::kQuantizeIntermediate:
      return quantize_intermediate();
    case MoePlanStageKind::kSecondGemm:
      return multiply_second();
    case MoePlanStageKind::kCombine:
      return combine_slots();
  }
}

RouteOutputs MoeRun::route_outputs() const {
  return {.ids = ids_,
          .weights = weights_,
          .replay = call_.outputs.routing_replay,
          .errors = call_.outputs.errors};
}

bool MoeRun::quantizes_by_token() const {
  return quantizes_input(call_, layer_.config) && !layer_.extents.input_per_expert;
}

CodedRows MoeRun::quantized_input() const {
  return plan_.input_rows().bind(at(MoeBufferId::kInputRows), plan_.input_rows().rows,
                                 layer_.device);
}

DequantizedRows MoeRun::dequantized_input() const {
  return dequantized_rows(layer_.w1, plan_.input_rows().rows,
                          scratch(MoeBufferId::kFirstGemmScratch));
}

// A fused activation and the quantization of whole rows may store the second GEMM's rows
// dequantized.
DequantizedRows MoeRun::dequantized_intermediate() const {
  return without_factors(dequantized_rows(layer_.w2, plan_.permutation().max_rows,
                                          scratch(MoeBufferId::kSecondGemmScratch)));
}

RoutePermuteArgs MoeRun::route_permute_args() const {
  RoutePermuteArgs args{.routing = call_.routing,
                        .config = layer_.config.routing,
                        .outputs = route_outputs(),
                        .expert_offset = layer_.config.expert_offset,
                        .local_experts = layer_.extents.local_experts,
                        .permutation = permutation_,
                        .cleared = counters()};
  if (!quantizes_by_token()) return args;
  args.input = {.rows = call_.inputs.values,
                .format = layer_.extents.input,
                .output = quantized_input(),
                .dequantized = dequantized_input()};
  if (layer_.input_multiplier) args.input.multiplier = layer_.input_multiplier->view().value;
  return args;
}

void MoeRun::route_and_permute_slots() {
  route_and_permute(route_permute_, stream_);
  if (!quantizes_by_token()) return;
  input_ = route_permute_.input.output;
  input_is_dequantized_ = route_permute_.input.dequantized.has_values();
}

void MoeRun::route_tokens() {
  route(call_.routing, layer_.config.routing, route_outputs(), stream_);
}

void MoeRun::permute_slots() {
  permute(ids_, layer_.config.expert_offset, layer_.extents.local_experts, permutation_, counters(),
          stream_);
}

void MoeRun::quantize_input() {
  const MoeExtents& extents = layer_.extents;
  QuantizeActivationsArgs args;
  args.rows = call_.inputs.values;
  args.format = extents.input;
  if (layer_.input_multiplier) args.multiplier = layer_.input_multiplier->view();
  if (extents.input_per_expert) {
    args.choice = RowChoice::kGathered;
    args.map = permutation_.row_to_token;
    args.tile_to_expert = permutation_.tile_to_expert;
    args.token_tile = permutation_.token_tile;
  }
  args.output = quantized_input();
  args.dequantized = without_factors(dequantized_input());
  quantize_activations(args, stream_);
  input_ = args.output;
  input_by_token_ = !extents.input_per_expert;
  input_is_dequantized_ = args.dequantized.has_values();
}

void MoeRun::multiply_first() {
  const bool is_gated = activation_info(layer_.config.activation.kind).is_gated;
  GroupedGemmArgs args;
  args.a = input_;
  args.gather_tokens = input_by_token_;
  args.permutation = permutation_;
  args.accumulation = layer_.extents.accumulation;
  if (layer_.config.weight_on_input) {
    args.slot_weights = weights_;
    args.slot_weights.rank = 1;
    args.slot_weights.shape[0] = weights_.num_elements();
    args.slot_weights.strides[0] = 1;
  }
  args.scale = layer_.up_scale.view();
  if (is_gated) {
    args.gate_order = layer_.config.gate_order;
    args.gate_scale = layer_.gate_scale.view();
  }
  args.bias = layer_.bias1.view();
  if (plan_.fuses_activation()) {
    args.activation = fused_activation();
  } else {
    args.output = fc1_;
  }
  LayerGemm in_layer{.next_tile = counter(0), .rows_are_dequantized = input_is_dequantized_};
  if (plan_.fuses_activation() && !plan_.quantizes_fused_rows()) {
    in_layer.activated = dequantized_intermediate();
  }
  grouped_gemm(args, layer_.w1, scratch(MoeBufferId::kFirstGemmScratch), in_layer, stream_);
}

GemmActivation MoeRun::fused_activation() const {
  return {.activation = layer_.config.activation,
          .format = fused_rows(layer_.extents),
          .multiplier = layer_.inter_multiplier.view(),
          .output = plan_.quantizes_fused_rows() ? CodedRows{.values = fc1_} : intermediate_};
}

void MoeRun::quantize_fc1() {
  quantize_activations({.rows = fc1_,
                        .format = RowFormat::kFp8Group,
                        .choice = RowChoice::kListed,
                        .map = permutation_.slot_to_row,
                        .output = fc1_quantized_},
                       stream_);
}

void MoeRun::activate_rows() {
  ActivateArgs args;
  args.input = layer_.extents.double_quantize_fc1 ? fc1_quantized_ : CodedRows{.values = fc1_};
  args.activation = layer_.config.activation;
  args.gate_order = layer_.config.gate_order;
  args.slot_to_row = permutation_.slot_to_row;
  args.tile_to_expert = permutation_.tile_to_expert;
  args.token_tile = permutation_.token_tile;
  args.format = layer_.extents.intermediate;
  args.multiplier = layer_.inter_multiplier.view();
  args.output = intermediate_;
  activate(args, stream_);
}

void MoeRun::quantize_intermediate() {
  quantize_activations({.rows = fc1_,
                        .format = layer_.extents.intermediate,
                        .choice = RowChoice::kListed,
                        .map = permutation_.slot_to_row,
                        .output = intermediate_,
                        .dequantized = dequantized_intermediate()},
                       stream_);
}

void MoeRun::multiply_second() {
  GroupedGemmArgs args;
  args.a = intermediate_;
  args.permutation = permutation_;
  args.accumulation = layer_.extents.accumulation;
  args.scale = layer_.down_scale.view();
  args.bias = layer_.bias2.view();
  args.output = slot_rows_;
  const bool is_dequantized = plan_.fuses_activation() && dequantized_intermediate().has_values();
  grouped_gemm(args, layer_.w2, scratch(MoeBufferId::kSecondGemmScratch),
               {.next_tile = counter(1),
                .tiles_are_complete = chain_.is_complete(buffer_set({MoeBufferId::kPermutation})),
                .rows_are_dequantized = is_dequantized},
               stream_);
}

void MoeRun::combine_slots() {
  if (call_.outputs.out.is_absent()) return;
  const TensorView weights = layer_.config.weight_on_input ? TensorView{} : weights_;
  const MoeBufferSet maps = buffer_set({MoeBufferId::kPermutation, MoeBufferId::kWeights});
  combine_in_layer(slot_rows_, permutation_.slot_to_row, weights, call_.outputs.out,
                   chain_.is_complete(maps), stream_);
}

WordsToClear MoeRun::counters() const {
  if (layer_.device.type == DeviceType::kCpu) return {};
  return {.words = counter(0), .count = kGemmsOfALayer};
}

uint32_t* MoeRun::counter(int64_t gemm) const {
  if (layer_.device.type == DeviceType::kCpu) return nullptr;
  return reinterpret_cast<uint32_t*>(at(MoeBufferId::kCounters)) + gemm;
}

}  // namespace narrowfloat
