// See moe_run.h.
#include "layers/moe/moe_run.h"

#include "ops/code_rows/code_rows.h"
#include "ops/grouped_gemm/grouped_gemm_problem.h"
#include "ops/permute/permute_problem.h"
#include "ops/route/route_permute.h"

namespace narrowfloat {
namespace {

// Rows that can be made without seeing a row whole.
DecodedRows without_factors(const DecodedRows& rows) {
  return rows.factors == nullptr ? rows : DecodedRows{};
}

}  // namespace

MoeRun::MoeRun(const PreparedMoe& layer, const MoeWorkspace& plan, const MoeCall& call,
               Stream stream)
    : layer_(layer), plan_(plan), call_(call), stream_(stream) {
  const MoeOutputs& outputs = call.outputs;
  ids_ = output_or(outputs.topk_ids, plan.ids, DType::kI32);
  weights_ = output_or(outputs.expert_weights, plan.weights, DType::kF32);
  permutation_ = plan.permutation_layout.bind(at(plan.permutation), layer.device);
  if (!outputs.slot_to_row.is_absent()) permutation_.slot_to_row = outputs.slot_to_row;
  const int64_t max_rows = plan.permutation_layout.max_rows;
  const MoeExtents& extents = layer.extents;
  fc1_ = plan.fuses_activation ? TensorView::contiguous(at(plan.gemm_rows), DType::kBF16,
                                                        {max_rows, extents.inter}, layer.device)
                               : TensorView::contiguous(at(plan.gemm_rows), extents.fc1_dtype,
                                                        {max_rows, extents.fc1_rows}, layer.device);
  intermediate_ = plan.intermediate.bind(at(plan.intermediate_rows), max_rows, layer.device);
  slot_rows_ = outputs.slot_out;
  if (slot_rows_.is_absent()) {
    slot_rows_ = TensorView::contiguous(at(plan.gemm_rows), extents.slot_dtype,
                                        {max_rows, extents.hidden}, layer.device);
  }
}

std::byte* MoeRun::at(int64_t offset) const {
  return static_cast<std::byte*>(call_.workspace.data) + offset;
}

TensorView MoeRun::output_or(const TensorView& requested, int64_t offset, DType dtype) const {
  if (!requested.is_absent()) return requested;
  return TensorView::contiguous(at(offset), dtype, {call_.tokens, layer_.extents.slots},
                                layer_.device);
}

void MoeRun::run(MoeStage last) {
  const bool is_joint = begin_jointly();
  if (!is_joint) route_tokens();
  if (last == MoeStage::kRoute) return;
  if (!is_joint) permute_slots();
  if (last == MoeStage::kPermute) return;
  const InputRows input =
      is_joint && codes_by_token()
          ? InputRows{.rows = coded_rows(), .is_decoded = decoded_input().has_values()}
          : coded_input();
  if (last == MoeStage::kCodeInput) return;
  multiply_first(input);
  if (last == MoeStage::kFirstGemm) return;
  activate_rows();
  if (last == MoeStage::kActivation) return;
  multiply_second();
  if (last == MoeStage::kSecondGemm) return;
  combine_slots();
}

RouteOutputs MoeRun::route_outputs() const {
  return {.ids = ids_,
          .weights = weights_,
          .replay = call_.outputs.routing_replay,
          .errors = call_.outputs.errors};
}

bool MoeRun::codes_input() const {
  return layer_.extents.input != RowFormat::kBf16 && is_plain_input(call_.inputs, layer_.config);
}

bool MoeRun::codes_by_token() const { return codes_input() && !layer_.extents.input_per_expert; }

CodedRows MoeRun::coded_rows() const {
  return plan_.input.bind(at(plan_.input_rows), plan_.input.rows, layer_.device);
}

DecodedRows MoeRun::decoded_input() const {
  return decoded_rows(layer_.w1, plan_.input.rows, first_workspace());
}

DecodedRows MoeRun::left_intermediate() const {
  return without_factors(
      decoded_rows(layer_.w2, plan_.permutation_layout.max_rows, second_workspace()));
}

bool MoeRun::begin_jointly() {
  RoutePermuteArgs args{.routing = call_.routing,
                        .config = layer_.config.routing,
                        .outputs = route_outputs(),
                        .expert_offset = layer_.config.expert_offset,
                        .local_experts = layer_.extents.local_experts,
                        .permutation = permutation_,
                        .cleared = counters()};
  if (codes_by_token()) {
    args.input = {.rows = call_.inputs.values,
                  .format = layer_.extents.input,
                  .output = coded_rows(),
                  .decoded = decoded_input()};
    if (layer_.input_multiplier) args.input.multiplier = layer_.input_multiplier->view().value;
  }
  return route_and_permute(args, stream_);
}

void MoeRun::route_tokens() {
  route(call_.routing, layer_.config.routing, route_outputs(), stream_);
}

void MoeRun::permute_slots() {
  permute(ids_, layer_.config.expert_offset, layer_.extents.local_experts, permutation_, counters(),
          stream_);
}

MoeRun::InputRows MoeRun::coded_input() {
  if (!codes_input()) return {.rows = call_.inputs};
  const MoeExtents& extents = layer_.extents;
  CodeRowsArgs args;
  args.rows = call_.inputs.values;
  args.format = extents.input;
  if (layer_.input_multiplier) args.multiplier = layer_.input_multiplier->view();
  if (extents.input_per_expert) {
    args.choice = RowChoice::kGathered;
    args.map = permutation_.row_to_token;
    args.tile_to_expert = permutation_.tile_to_expert;
    args.token_tile = permutation_.token_tile;
  }
  args.output = coded_rows();
  args.decoded = without_factors(decoded_input());
  code_rows(args, stream_);
  return {.rows = args.output,
          .by_token = !extents.input_per_expert,
          .is_decoded = args.decoded.has_values()};
}

void MoeRun::multiply_first(const InputRows& input) {
  const bool is_gated = activation_info(layer_.config.activation.kind).is_gated;
  GroupedGemmArgs args;
  args.a = input.rows;
  args.gather_tokens = input.by_token;
  args.permutation = permutation_;
  args.accumulation = layer_.config.accumulation;
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
  if (plan_.fuses_activation) {
    args.activation = fused_activation();
  } else {
    args.output = fc1_;
  }
  LayerGemm in_layer{.next_item = counter(0), .rows_are_decoded = input.is_decoded};
  if (plan_.fuses_activation && !plan_.codes_fused_rows) {
    in_layer.activated = left_intermediate();
  }
  grouped_gemm(args, layer_.w1, first_workspace(), in_layer, stream_);
}

GemmActivation MoeRun::fused_activation() const {
  const MoeExtents& extents = layer_.extents;
  return {.activation = layer_.config.activation,
          .format = fused_rows(extents),
          .multiplier = layer_.inter_multiplier.view(),
          .output = plan_.codes_fused_rows ? CodedRows{.values = fc1_} : intermediate_};
}

void MoeRun::activate_rows() {
  const MoeExtents& extents = layer_.extents;
  if (!plan_.fuses_activation) return activate_apart();
  if (!plan_.codes_fused_rows) return;
  code_rows({.rows = fc1_,
             .format = extents.intermediate,
             .choice = RowChoice::kMarked,
             .map = permutation_.row_to_slot,
             .output = intermediate_,
             .decoded = left_intermediate()},
            stream_);
}

void MoeRun::activate_apart() {
  const int64_t max_rows = plan_.permutation_layout.max_rows;
  ActivateArgs args;
  args.input.values = fc1_;
  if (layer_.config.double_quantize_fc1) {
    args.input = plan_.fc1_coded.bind(at(plan_.fc1_coded_rows), max_rows, layer_.device);
    code_rows({.rows = fc1_,
               .format = RowFormat::kFp8Group,
               .choice = RowChoice::kMarked,
               .map = permutation_.row_to_slot,
               .output = args.input},
              stream_);
  }
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

void MoeRun::multiply_second() {
  GroupedGemmArgs args;
  args.a = intermediate_;
  args.permutation = permutation_;
  args.accumulation = layer_.config.accumulation;
  args.scale = layer_.down_scale.view();
  args.bias = layer_.bias2.view();
  args.output = slot_rows_;
  const bool is_decoded = plan_.fuses_activation && left_intermediate().has_values();
  // The first GEMM lies between the permutation and this one, which therefore reads tiles before it
  // waits. That holds as long as no block of a kernel between the two ends, or allows the next
  // grid, before its own wait_for_previous_grids(): a rule for every kernel that a layer queues
  // there.
  grouped_gemm(
      args, layer_.w2, second_workspace(),
      {.next_item = counter(1), .tiles_are_complete = true, .rows_are_decoded = is_decoded},
      stream_);
}

void MoeRun::combine_slots() {
  if (call_.outputs.out.is_absent()) return;
  const TensorView weights = layer_.config.weight_on_input ? TensorView{} : weights_;
  combine(slot_rows_, permutation_.slot_to_row, weights, call_.outputs.out, stream_);
}

WordsToClear MoeRun::counters() const {
  if (layer_.device.type == DeviceType::kCpu) return {};
  return {.words = counter(0), .count = kGemmsOfALayer};
}

uint32_t* MoeRun::counter(int64_t gemm) const {
  if (layer_.device.type == DeviceType::kCpu) return nullptr;
  return reinterpret_cast<uint32_t*>(at(plan_.counters)) + gemm;
}

TensorView MoeRun::first_workspace() const {
  return TensorView::contiguous(at(plan_.gemm), DType::kU8, {plan_.gemm_bytes}, layer_.device);
}

TensorView MoeRun::second_workspace() const {
  return TensorView::contiguous(at(plan_.second_gemm), DType::kU8, {plan_.second_gemm_bytes},
                                layer_.device);
}

}  // namespace narrowfloat
