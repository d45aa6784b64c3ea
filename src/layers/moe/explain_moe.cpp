// explain_moe() asks the implementations of each stage whether they take its problem; plan_moe()
// lists the stages of the plan with their buffers.
#include <utility>

#include "base/throw_error.h"
#include "layers/moe/moe_checks.h"
#include "layers/moe/stage_problems.h"
#include "runtime/dispatch.h"

namespace narrowfloat {
namespace {

// A run of `tokens` tokens from logits, with unquantized rows.
class ExplainedRun {
 public:
  ExplainedRun(const MoeConfig& config, const MoeReferenceOptions& reference, int64_t tokens,
               Device device)
      : extents_(explained_extents(config, reference, tokens, device)),
        permutation_(permutation_of(config, extents_, tokens)),
        stages_(config, extents_, permutation_, device),
        plan_(extents_, tokens, permutation_.token_tile, gemm_bytes(tokens)) {
    MoeCallFacts facts{.quantizes_input = extents_.input != RowFormat::kBf16};
    if (device.type != DeviceType::kCpu) {
      routing_ =
          explain_candidates("route_permute", route_permute_impls(), stages_.route_permute());
      facts.joins_routing = joins_routing(stages_.route_permute());
    }
    plan_.list_stages(facts);
  }

  [[nodiscard]] const MoePlan& plan() const { return plan_; }
  // Empty on a CPU, which has no fused prologue.
  [[nodiscard]] const Explanation& joint_routing() const { return routing_; }

  [[nodiscard]] Explanation explain(MoePlanStageKind kind) const {
    switch (kind) {
      case MoePlanStageKind::kRoutePermute:
        return routing_;
      case MoePlanStageKind::kRoute:
        return explain_candidates("route", route_impls(), stages_.route());
      case MoePlanStageKind::kPermute:
        return explain_candidates("permute", permute_impls(), stages_.permute());
      case MoePlanStageKind::kQuantizeInput:
        return explain_quantizer(stages_.quantize_input());
      case MoePlanStageKind::kFirstGemm:
        return explain_candidates("grouped_gemm", grouped_gemm_impls(), stages_.first_gemm());
      case MoePlanStageKind::kQuantizeFc1:
        return explain_quantizer(stages_.quantize_fc1());
      case MoePlanStageKind::kActivation:
        return explain_candidates("activation", activation_impls(), stages_.activation());
      case MoePlanStageKind::kQuantizeIntermediate:
        return explain_quantizer(stages_.quantize_intermediate());
      case MoePlanStageKind::kSecondGemm:
        return explain_candidates("grouped_gemm", grouped_gemm_impls(), stages_.second_gemm());
      case MoePlanStageKind::kCombine:
        return explain_candidates("combine", combine_impls(), stages_.combine());
    }
    return {};
  }

  // Keeps the candidates of an activation that the first GEMM fuses, all passed over.
  [[nodiscard]] Explanation explain_fused_activation() const {
    Explanation activation = explain(MoePlanStageKind::kActivation);
    activation.chosen = "fused into grouped_gemm";
    for (Candidate& candidate : activation.candidates) {
      if (candidate.supported) candidate.reason = "passed over: grouped_gemm fuses the activation";
    }
    return activation;
  }

 private:
  static MoeExtents explained_extents(const MoeConfig& config, const MoeReferenceOptions& reference,
                                      int64_t tokens, Device device) {
    check_moe_config(config);
    check_reference_options(reference, config);
    if (tokens < 0) throw_invalid("tokens: expected >= 0, got {}", tokens);
    MoeExtents extents = moe_extents(config, reference);
    const PermutationLayout permutation = permutation_of(config, extents, tokens);
    extents.fuses_activation =
        StageProblems(config, extents, permutation, device).fuses_activation();
    return extents;
  }
  static PermutationLayout permutation_of(const MoeConfig& config, const MoeExtents& extents,
                                          int64_t tokens) {
    const int32_t tile = config.token_tile.value_or(
        default_token_tile(tokens, extents.slots, extents.local_experts));
    return permutation_layout(tokens, extents.slots, extents.local_experts, tile);
  }
  static Explanation explain_quantizer(const QuantizeActivationsProblem& problem) {
    return explain_candidates("quantize_activations", quantize_activations_impls(), problem);
  }
  [[nodiscard]] int64_t gemm_bytes_of(const GroupedGemmProblem& problem, int64_t rows) const {
    const GroupedGemmImpl* impl =
        find_implementation("grouped_gemm", grouped_gemm_impls(), problem);
    return impl == nullptr ? 0 : impl->workspace_bytes(problem, rows, extents_.accumulation);
  }
  [[nodiscard]] GemmBytes gemm_bytes(int64_t tokens) const {
    return {.first = gemm_bytes_of(stages_.first_gemm(), tokens),
            .second = gemm_bytes_of(stages_.second_gemm(), permutation_.max_rows)};
  }

  MoeExtents extents_;
  PermutationLayout permutation_;
  StageProblems stages_;
  MoePlan plan_;
  Explanation routing_;
};

std::vector<Explanation> explanations_of(const ExplainedRun& run) {
  std::vector<Explanation> explanations;
  const bool is_passed_over = !run.joint_routing().op.empty() &&
                              run.plan().stages().front().kind != MoePlanStageKind::kRoutePermute;
  if (is_passed_over) explanations.push_back(run.joint_routing());
  for (const MoePlanStage& stage : run.plan().stages()) {
    explanations.push_back(run.explain(stage.kind));
    if (stage.kind == MoePlanStageKind::kFirstGemm && run.plan().fuses_activation()) {
      explanations.push_back(run.explain_fused_activation());
    }
  }
  return explanations;
}

}  // namespace

std::vector<Explanation> explain_moe(const MoeConfig& config, int64_t tokens, Device device) {
  return explanations_of(ExplainedRun(config, {}, tokens, device));
}

std::vector<Explanation> explain_moe_reference(const MoeConfig& config,
                                               const MoeReferenceOptions& options, int64_t tokens) {
  return explanations_of(ExplainedRun(config, options, tokens, Device{}));
}

MoePlanInfo plan_moe(const MoeConfig& config, int64_t tokens, Device device) {
  const ExplainedRun run(config, {}, tokens, device);
  MoePlanInfo info{.workspace_bytes = run.plan().workspace_bytes()};
  const auto names_of = [](MoeBufferSet set) {
    std::vector<std::string> names;
    for (size_t i = 0; i < kMoeBuffers; ++i) {
      const auto id = static_cast<MoeBufferId>(i);
      if (has(set, id)) names.emplace_back(name(id));
    }
    return names;
  };
  for (const MoePlanStage& stage : run.plan().stages()) {
    const Explanation explanation = run.explain(stage.kind);
    info.stages.push_back({.stage = std::string(name(stage.kind)),
                           .op = explanation.op,
                           .implementation = explanation.chosen,
                           .reads = names_of(stage.reads),
                           .writes = names_of(stage.writes)});
  }
  for (size_t i = 0; i < kMoeBuffers; ++i) {
    const auto id = static_cast<MoeBufferId>(i);
    const MoeBuffer& buffer = run.plan().buffer(id);
    info.buffers.push_back({std::string(name(id)), buffer.offset, buffer.bytes});
  }
  return info;
}

}  // namespace narrowfloat
