// See plan.h; docs/moe.md has the sizes as a formula.
#include "layers/moe/plan.h"

#include <algorithm>

#include "base/assert.h"
#include "base/int_math.h"

namespace narrowfloat {
namespace {

using enum MoeBufferId;
using enum MoePlanStageKind;

// Bytes of a row of the result of the first GEMM, before the rows of the second.
int64_t fc1_row_bytes(const MoeExtents& extents) {
  if (!extents.fuses_activation) return extents.fc1_rows * bits(extents.fc1_dtype()) / 8;
  return quantizes_fused_rows(extents) ? row_bytes(fused_rows(extents), extents.inter) : 0;
}

}  // namespace

std::string_view name(MoeBufferId id) {
  constexpr std::array<std::string_view, kMoeBuffers> kNames{
      "ids",       "weights",           "permutation", "counters",           "input_rows",
      "gemm_rows", "intermediate_rows", "fc1_rows",    "first_gemm_scratch", "second_gemm_scratch"};
  return kNames[static_cast<size_t>(id)];
}

std::string_view name(MoePlanStageKind kind) {
  constexpr std::array<std::string_view, kMoePlanStageKinds> kNames{
      "route_permute", "route",        "permute",    "quantize_input",
      "first_gemm",    "quantize_fc1", "activation", "quantize_intermediate",
      "second_gemm",   "combine"};
  return kNames[static_cast<size_t>(kind)];
}

RowFormat fused_rows(const MoeExtents& extents) {
  return has_row_scale(extents.intermediate) ? RowFormat::kBf16 : extents.intermediate;
}

MoePlan::MoePlan(const MoeExtents& extents, int64_t tokens, int32_t token_tile,
                 const GemmBytes& gemms)
    : tokens_(tokens),
      permutation_(permutation_layout(tokens, extents.slots, extents.local_experts, token_tile)),
      fuses_activation_(extents.fuses_activation),
      quantizes_fused_rows_(narrowfloat::quantizes_fused_rows(extents)),
      input_per_expert_(extents.input_per_expert),
      double_quantize_fc1_(extents.double_quantize_fc1),
      weight_on_input_(extents.weight_on_input) {
  divide_workspace(extents, gemms);
}

void MoePlan::divide_workspace(const MoeExtents& extents, const GemmBytes& gemms) {
  const int64_t max_rows = permutation_.max_rows;
  const int64_t input_rows = extents.input_per_expert ? max_rows : tokens_;
  input_ = row_buffers(extents.input, extents.input == RowFormat::kBf16 ? 0 : input_rows,
                       extents.hidden);
  intermediate_ = row_buffers(extents.intermediate, max_rows, extents.inter);
  fc1_ = row_buffers(RowFormat::kFp8Group, extents.double_quantize_fc1 ? max_rows : 0,
                     extents.fc1_rows);
  const auto take = [&](MoeBufferId id, int64_t bytes) {
    buffers_[static_cast<size_t>(id)] = {bytes_, bytes};
    bytes_ += round_up(bytes, kWorkspaceAlignment);
  };
  const int64_t fc1_bytes = max_rows * fc1_row_bytes(extents);
  const int64_t slot_bytes = max_rows * extents.hidden * bits(extents.slot_dtype) / 8;
  take(kIds, tokens_ * extents.slots * 4);
  take(kWeights, tokens_ * extents.slots * 4);
  take(kPermutation, permutation_.bytes);
  take(kCounters, kGemmsOfALayer * int64_t{sizeof(uint32_t)});
  take(kInputRows, input_.bytes());
  take(kGemmRows, std::max(fc1_bytes, slot_bytes));
  take(kIntermediateRows, intermediate_.bytes());
  take(kFc1Rows, fc1_.bytes());
  if (extents.fuses_activation) {
    take(kFirstGemmScratch, gemms.first);
    take(kSecondGemmScratch, gemms.second);
  } else {
    take(kFirstGemmScratch, std::max(gemms.first, gemms.second));
    buffers_[static_cast<size_t>(kSecondGemmScratch)] = buffer(kFirstGemmScratch);
  }
}

void MoePlan::add(MoePlanStageKind kind, MoeStage first, MoeBufferSet reads, MoeBufferSet writes) {
  NF_ASSERT(count_ < stages_.size());
  stages_[count_++] = {kind, first, reads, writes};
}

void MoePlan::list_stages(const MoeCallFacts& call) {
  count_ = 0;
  const MoeBufferSet weights = buffer_set({kWeights});
  const MoeBufferSet routing = buffer_set({kIds}) | weights;
  const MoeBufferSet permutation = buffer_set({kPermutation});
  const MoeBufferSet counters = buffer_set({kCounters});
  // Rows may also be stored dequantized, in the workspace of the GEMM that reads them.
  const MoeBufferSet input = buffer_set({kInputRows, kFirstGemmScratch});
  const MoeBufferSet intermediate = buffer_set({kIntermediateRows, kSecondGemmScratch});
  const MoeBufferSet gemm_rows = buffer_set({kGemmRows});
  const MoeBufferSet fc1 = buffer_set({kFc1Rows});

  const bool quantizes_by_token = call.quantizes_input && !input_per_expert_;
  if (call.joins_routing) {
    add(kRoutePermute, MoeStage::kRoute, 0,
        routing | permutation | counters | (quantizes_by_token ? input : 0));
  } else {
    add(kRoute, MoeStage::kRoute, 0, routing);
    add(kPermute, MoeStage::kPermute, buffer_set({kIds}), permutation | counters);
  }
  if (call.quantizes_input && !(call.joins_routing && quantizes_by_token)) {
    add(kQuantizeInput, MoeStage::kQuantizeInput, input_per_expert_ ? permutation : 0, input);
  }
  const bool leaves_intermediate = fuses_activation_ && !quantizes_fused_rows_;
  add(kFirstGemm, MoeStage::kFirstGemm,
      permutation | counters | (call.quantizes_input ? input : 0) |
          (weight_on_input_ ? weights : 0),
      (leaves_intermediate ? intermediate : gemm_rows) | buffer_set({kFirstGemmScratch}) |
          counters);
  if (double_quantize_fc1_) {
    add(kQuantizeFc1, MoeStage::kActivation, gemm_rows | permutation, fc1);
  }
  if (!fuses_activation_) {
    add(kActivation, MoeStage::kActivation, permutation | (double_quantize_fc1_ ? fc1 : gemm_rows),
        buffer_set({kIntermediateRows}));
  } else if (quantizes_fused_rows_) {
    add(kQuantizeIntermediate, MoeStage::kActivation, gemm_rows | permutation, intermediate);
  }
  add(kSecondGemm, MoeStage::kSecondGemm,
      permutation | counters | (fuses_activation_ ? intermediate : buffer_set({kIntermediateRows})),
      gemm_rows | buffer_set({kSecondGemmScratch}) | counters);
  add(kCombine, MoeStage::kCombine, permutation | gemm_rows | (weight_on_input_ ? 0 : weights), 0);
}

}  // namespace narrowfloat
