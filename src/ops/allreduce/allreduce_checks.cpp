// See allreduce_checks.h. Each pattern says which tensors it reads and writes; a tensor that it
// does not know is an error, never ignored.
#include "ops/allreduce/allreduce_checks.h"

#include <array>
#include <cmath>
#include <optional>

#include "base/int_math.h"
#include "base/throw_error.h"
#include "tensor/block_math.h"
#include "tensor/element_io.h"
#include "tensor/layouts/registry.h"
#include "tensor/view_checks.h"

namespace narrowfloat {
namespace {

using Quantization = AllReduceQuantization;

template <typename Enum>
void require_enumerator(std::string_view argument, Enum value, Enum last) {
  const int number = static_cast<int>(value);
  if (number >= 0 && number <= static_cast<int>(last)) return;
  throw_invalid("{}: expected an enumerator from 0 to {}, got {}", argument, static_cast<int>(last),
                number);
}

// The block format whose scales have a layout.
std::optional<FormatId> format_with_layout(Quantization quantization) {
  switch (quantization) {
    case Quantization::kNvfp4:
      return FormatId::kNvfp4;
    case Quantization::kNvfp4PerToken:
      return FormatId::kNvfp4PerToken;
    case Quantization::kMxfp8:
      return FormatId::kMxfp8;
    case Quantization::kMxfp4:
      return FormatId::kMxfp4;
    case Quantization::kNone:
    case Quantization::kFp8Tensor:
    case Quantization::kFp8Token:
    case Quantization::kFp8GroupUe8m0:
    case Quantization::kFp8Block1x128:
      break;
  }
  return {};
}

bool has_fp4_codes(Quantization quantization) {
  const auto format = format_with_layout(quantization);
  return format && format_info(*format).element_bits == 4;
}

// --- The problem --------------------------------------------------------------------------------

void check_enumerators(const AllReduceProblem& problem) {
  require_enumerator("problem.pattern", problem.pattern, AllReducePattern::kNormNvfp4PerToken);
  require_enumerator("problem.moe_quantization", problem.moe_quantization, Quantization::kMxfp4);
  require_enumerator("problem.scale_layout", problem.scale_layout, ScaleLayoutId::kMnMajor);
  require_enumerator("problem.accumulation", problem.accumulation, AllReduceAccumulation::kElement);
  require_enumerator("problem.exactness", problem.exactness, AllReduceExactness::kFast);
  require_enumerator("problem.algorithm", problem.algorithm, AllReduceAlgorithm::kReference);
}

void check_element(const AllReduceProblem& problem) {
  const DType element = problem.element;
  if (element == DType::kF16 || element == DType::kBF16) return;
  if (element == DType::kF32 && !is_moe(problem.pattern)) return;
  throw_invalid("problem.element: expected F16{} for pattern {}, got {}",
                is_moe(problem.pattern) ? " or BF16" : ", BF16 or F32", name(problem.pattern),
                name(element));
}

void check_group(const AllReduceProblem& problem) {
  if (quantization_of(problem) != Quantization::kFp8GroupUe8m0) {
    if (problem.group == 0) return;
    throw_invalid("problem.group: expected 0, as {} has no groups, got {}", name(problem.pattern),
                  problem.group);
  }
  for (const int group : {16, 32, 64, 128, 256}) {
    if (problem.group == group) return;
  }
  throw_invalid("problem.group: expected 16, 32, 64, 128 or 256 columns, got {}", problem.group);
}

int64_t hidden_multiple(const AllReduceProblem& problem) {
  const Quantization quantization = quantization_of(problem);
  if (quantization == Quantization::kFp8GroupUe8m0) return problem.group;
  const auto format = format_with_layout(quantization);
  return format ? column_multiple(format_info(*format)) : 8;
}

void check_extents(const AllReduceProblem& problem) {
  if (problem.tokens < 0) {
    throw_invalid("problem.tokens: expected >= 0, got {}", problem.tokens);
  }
  const int64_t multiple = hidden_multiple(problem);
  if (problem.hidden < multiple || problem.hidden % multiple != 0) {
    throw_invalid("problem.hidden: expected a positive multiple of {} for pattern {}, got {}",
                  multiple, name(problem.pattern), problem.hidden);
  }
  // Beyond this no size or offset of a tensor overflows: elements have at most 4 bytes, scales are
  // padded by 127 rows and 3 columns.
  constexpr int64_t kMostElements = int64_t{1} << 58;
  const auto elements = checked_mul(problem.tokens, problem.hidden);
  if (!elements || *elements > kMostElements || problem.hidden > kMostElements / 128) {
    throw_invalid("problem: expected tokens * hidden <= 2^58, got {} x {}", problem.tokens,
                  problem.hidden);
  }
}

void check_layout(const AllReduceProblem& problem) {
  constexpr ScaleLayoutId kDefault = AllReduceProblem{}.scale_layout;
  const auto format = format_with_layout(quantization_of(problem));
  if (!format) {
    if (problem.scale_layout == kDefault) return;
    throw_invalid(
        "problem.scale_layout: expected the default {}, as the scales of {} have one "
        "layout, got {}",
        name(kDefault), name(problem.pattern), name(problem.scale_layout));
  }
  if (format_info(*format).allows(problem.scale_layout)) return;
  throw_invalid(
      "problem.scale_layout: expected swizzled_128x4, swizzled_8x4 or linear for {}, "
      "got {}",
      name(*format), name(problem.scale_layout));
}

// --- The arguments ------------------------------------------------------------------------------

// Whether a pattern has a tensor.
enum class Presence { kForbidden, kOptional, kRequired };

Presence required_if(bool condition) {
  return condition ? Presence::kRequired : Presence::kForbidden;
}

// Checks tensors one by one, and collects the buffers for the check of overlaps.
class TensorChecks {
 public:
  TensorChecks(const AllReduceProblem& problem, Device device)
      : problem_(problem), device_(device) {}

  // Returns the data of a dense tensor; null where it is absent.
  void* require(std::string_view argument, const TensorView& view, Presence presence,
                std::initializer_list<DType> allowed, std::initializer_list<int64_t> shape) {
    if (!is_given(argument, view, presence)) return nullptr;
    require_tensor(argument, view, allowed, shape, device_);
    require_cuda_alignment(argument, view.data, device_);
    return view.data;
  }
  // As require(), but of any shape of `count` elements.
  void* require_count(std::string_view argument, const TensorView& view, Presence presence,
                      std::initializer_list<DType> allowed, int64_t count) {
    if (!is_given(argument, view, presence)) return nullptr;
    require_view(argument, view);
    require_dtype(argument, view, allowed);
    require_device(argument, view.device, device_);
    if (view.num_elements() != count) {
      throw_invalid("{}: expected {} values for {} tokens of {} columns, got {}", argument, count,
                    problem_.tokens, problem_.hidden, to_string(view));
    }
    require_dense(argument, view);
    require_data(argument, view);
    require_cuda_alignment(argument, view.data, device_);
    return view.data;
  }

  [[nodiscard]] bool is_given(std::string_view argument, const TensorView& view,
                              Presence presence) const {
    if (view.is_absent()) {
      if (presence != Presence::kRequired) return false;
      throw_invalid("{}: pattern {} needs it, got no tensor", argument, name(problem_.pattern));
    }
    if (presence != Presence::kForbidden) return true;
    throw_invalid(
        "{}: expected no tensor, as pattern {} does not use it, got {}; leave it out, or "
        "use another pattern",
        argument, name(problem_.pattern), to_string(view));
  }

  [[nodiscard]] const AllReduceProblem& problem() const { return problem_; }
  [[nodiscard]] Device device() const { return device_; }

 private:
  const AllReduceProblem& problem_;
  Device device_;
};

SourceArgs lower_source(TensorChecks& checks, const AllReduceArgs& args) {
  const AllReduceProblem& problem = checks.problem();
  const DType element = problem.element;
  const AllReduceSource kind = source_of(problem.pattern);
  const int64_t tokens = problem.tokens;
  const int64_t hidden = problem.hidden;
  const AllReduceMoe& moe = args.moe;
  const bool is_reduction = kind == AllReduceSource::kMoeReduction;
  const bool is_finalize = kind == AllReduceSource::kMoeFinalize;
  const auto extent = [](const TensorView& view, size_t axis) {
    return view.rank > static_cast<int>(axis) ? view.shape[axis] : 0;
  };
  SourceArgs source{.kind = kind};
  source.input = checks.require("input", args.input, required_if(kind == AllReduceSource::kInput),
                                {element}, {tokens, hidden});

  const int64_t experts = extent(moe.expert_rows, 0);
  MoeReductionArgs& reduction = source.reduction;
  reduction.expert_rows =
      checks.require("moe.expert_rows", moe.expert_rows, required_if(is_reduction), {element},
                     {experts, tokens, hidden});
  reduction.expert_scales = static_cast<const float*>(
      checks.require("moe.expert_scales", moe.expert_scales, required_if(is_reduction),
                     {DType::kF32}, {experts, tokens}));
  reduction.num_experts = static_cast<const int32_t*>(checks.require_count(
      "moe.num_experts", moe.num_experts, is_reduction ? Presence::kOptional : Presence::kForbidden,
      {DType::kI32}, 1));
  reduction.token_input = checks.require("moe.token_input", moe.token_input,
                                         required_if(is_reduction), {element}, {tokens, hidden});

  const int64_t rows = extent(moe.permuted_rows, 0);
  const int64_t top_k = extent(moe.slot_to_row, 1);
  const Presence optional = is_finalize ? Presence::kOptional : Presence::kForbidden;
  MoeFinalizeArgs& finalize = source.finalize;
  finalize.permuted_rows = checks.require("moe.permuted_rows", moe.permuted_rows,
                                          required_if(is_finalize), {element}, {rows, hidden});
  finalize.slot_to_row = static_cast<const int32_t*>(
      checks.require("moe.slot_to_row", moe.slot_to_row, required_if(is_finalize), {DType::kI32},
                     {tokens, top_k}));
  finalize.slot_weights = checks.require("moe.slot_weights", moe.slot_weights, optional,
                                         {DType::kF32, element}, {tokens, top_k});
  finalize.shared_expert =
      checks.require("moe.shared_expert", moe.shared_expert, optional, {element}, {tokens, hidden});
  if (experts > INT32_MAX || top_k > INT32_MAX) {
    throw_invalid("moe: expected at most 2^31 - 1 experts and slots of a token, got {} and {}",
                  experts, top_k);
  }
  if (!std::isfinite(moe.routed_scaling)) {
    throw_invalid("moe.routed_scaling: expected a finite number, got {}", moe.routed_scaling);
  }
  if (!is_finalize && moe.routed_scaling != 1.0F) {
    throw_invalid("moe.routed_scaling: expected 1, as pattern {} does not use it, got {}",
                  name(problem.pattern), moe.routed_scaling);
  }
  reduction.experts = static_cast<int32_t>(experts);
  finalize.rows = rows;
  finalize.top_k = static_cast<int32_t>(top_k);
  finalize.has_fp32_weights = moe.slot_weights.dtype == DType::kF32;
  finalize.routed_scaling = moe.routed_scaling;
  return source;
}

// The words of the exponents of FP8 groups: dense, or as the transposed view [tokens, words] with
// strides (1, align(tokens, 4)).
void lower_group_scales(const TensorChecks& checks, const TensorView& view,
                        EpilogueArgs& epilogue) {
  const AllReduceProblem& problem = checks.problem();
  const int64_t groups = problem.hidden / problem.group;
  const int64_t columns = ceil_div(groups, int64_t{4});
  const int64_t step = round_up(problem.tokens, int64_t{4});
  const int64_t least = (columns - 1) * step + problem.tokens;
  epilogue.scale_extents = {problem.tokens, groups};
  static_cast<void>(checks.is_given("scale_out", view, Presence::kRequired));
  require_view("scale_out", view);
  require_dtype("scale_out", view, {DType::kI32});
  require_device("scale_out", view.device, checks.device());
  const bool is_transposed = view.rank == 2 && view.shape[0] == problem.tokens &&
                             view.shape[1] == columns && view.strides[0] == 1 &&
                             view.strides[1] == step;
  const int64_t words = is_transposed ? least : view.num_elements();
  if (words < least || words > columns * step) {
    throw_invalid("scale_out: expected {} to {} words for {} tokens and {} groups, got {}", least,
                  columns * step, problem.tokens, groups, to_string(view));
  }
  if (!is_transposed) require_dense("scale_out", view);
  require_data("scale_out", view);
  require_cuda_alignment("scale_out", view.data, checks.device());
  epilogue.scale_out = view.data;
  epilogue.scale_words = words;
}

void lower_block_scales(TensorChecks& checks, const TensorView& view, FormatId format,
                        EpilogueArgs& epilogue) {
  const AllReduceProblem& problem = checks.problem();
  const FormatInfo& info = format_info(format);
  const DType scale_dtype = info.scale_type == ScaleType::kUE8M0 ? DType::kF8E8M0 : DType::kF8E4M3;
  epilogue.scale_layout = problem.scale_layout;
  epilogue.scale_extents = scale_extents(info, problem.tokens, problem.hidden);
  const int64_t size = scale_image_size(problem.scale_layout, epilogue.scale_extents.rows,
                                        epilogue.scale_extents.blocks);
  epilogue.scale_out =
      checks.require_count("scale_out", view, Presence::kRequired, {DType::kU8, scale_dtype}, size);
  epilogue.scale_words = size / 4;
}

void lower_scales(TensorChecks& checks, const AllReduceArgs& args, EpilogueArgs& epilogue) {
  const AllReduceProblem& problem = checks.problem();
  const Quantization quantization = epilogue.quantization;
  if (const auto format = format_with_layout(quantization)) {
    lower_block_scales(checks, args.scale_out, *format, epilogue);
  } else if (quantization == Quantization::kFp8GroupUe8m0) {
    lower_group_scales(checks, args.scale_out, epilogue);
  } else if (quantization == Quantization::kFp8Block1x128) {
    epilogue.scale_extents =
        scale_extents(format_info(FormatId::kFp8Block1x128), problem.tokens, problem.hidden);
    epilogue.scale_words = epilogue.scale_extents.rows * epilogue.scale_extents.blocks;
    epilogue.scale_out =
        checks.require("scale_out", args.scale_out, Presence::kRequired, {DType::kF32},
                       {epilogue.scale_extents.rows, epilogue.scale_extents.blocks});
  } else {
    const bool has_scales = quantization == Quantization::kFp8Token;
    epilogue.row_scale_out = static_cast<float*>(checks.require_count(
        "scale_out", args.scale_out, required_if(has_scales), {DType::kF32}, problem.tokens));
  }
  const bool has_row_scales = quantization == Quantization::kNvfp4PerToken;
  void* const row_scales =
      checks.require_count("row_scale_out", args.row_scale_out, required_if(has_row_scales),
                           {DType::kF32}, problem.tokens);
  if (has_row_scales) epilogue.row_scale_out = static_cast<float*>(row_scales);
  const bool has_global_scale =
      quantization == Quantization::kFp8Tensor || quantization == Quantization::kNvfp4;
  epilogue.global_scale = static_cast<const float*>(checks.require_count(
      "global_scale", args.global_scale, required_if(has_global_scale), {DType::kF32}, 1));
}

void lower_quantized(TensorChecks& checks, const AllReduceArgs& args, EpilogueArgs& epilogue) {
  const AllReduceProblem& problem = checks.problem();
  const bool is_fp4 = has_fp4_codes(epilogue.quantization);
  epilogue.quant_out = static_cast<uint8_t*>(checks.require(
      "quant_out", args.quant_out, required_if(epilogue.quantization != Quantization::kNone),
      {is_fp4 ? DType::kF4 : DType::kF8E4M3, DType::kU8},
      {problem.tokens, is_fp4 ? problem.hidden / 2 : problem.hidden}));
  epilogue.rules = BlockRules{.input_max = largest_finite(problem.element)};
  epilogue.group = problem.group;
  lower_scales(checks, args, epilogue);
}

EpilogueArgs lower_epilogue(TensorChecks& checks, const AllReduceArgs& args) {
  const AllReduceProblem& problem = checks.problem();
  const bool is_normed = has_norm(problem.pattern);
  const bool is_fused_moe = is_moe(problem.pattern);
  EpilogueArgs epilogue{.has_norm = is_normed,
                        .quantization = quantization_of(problem),
                        .tokens = problem.tokens,
                        .hidden = problem.hidden,
                        .eps = args.eps,
                        .weight_bias = args.weight_bias};
  const auto rows = [&](std::string_view argument, const TensorView& view, Presence presence) {
    return checks.require(argument, view, presence, {problem.element},
                          {problem.tokens, problem.hidden});
  };
  // The outputs of MoE patterns are optional.
  const auto output = [&](bool condition) {
    return is_fused_moe ? Presence::kOptional : required_if(condition);
  };
  epilogue.residual_in = rows("residual_in", args.residual_in, required_if(is_normed));
  epilogue.gamma = checks.require("gamma", args.gamma, required_if(is_normed), {problem.element},
                                  {problem.hidden});
  epilogue.ar_out = rows("ar_out", args.ar_out, output(!is_normed));
  epilogue.residual_out = rows("residual_out", args.residual_out, output(is_normed));
  epilogue.norm_out = rows("norm_out", args.norm_out, output(stores_norm(problem.pattern)));
  lower_quantized(checks, args, epilogue);
  const bool has_output = epilogue.quantization != Quantization::kNone ||
                          !args.ar_out.is_absent() || !args.residual_out.is_absent() ||
                          !args.norm_out.is_absent();
  if (!has_output) {
    throw_invalid(
        "ar_out, residual_out, norm_out: pattern {} without quantization needs at least "
        "one of them, got none",
        name(problem.pattern));
  }
  return epilogue;
}

// Codes of F4 count two elements a byte, but these tensors count bytes.
ByteRange code_range(std::string_view argument, TensorView view) {
  if (view.dtype == DType::kF4) view.dtype = DType::kU8;
  return byte_range(argument, view);
}

// Inputs that an output may be written over: element by element, each is read before it is written.
bool may_share(const ByteRange& output, const ByteRange& input) {
  if (output.data != input.data) return false;
  if (input.argument == "residual_in") return output.argument == "residual_out";
  return input.argument == "input" &&
         (output.argument == "ar_out" || output.argument == "residual_out" ||
          output.argument == "norm_out");
}

void check_overlap(const AllReduceArgs& args) {
  const AllReduceMoe& moe = args.moe;
  const std::array outputs{
      byte_range("ar_out", args.ar_out),       byte_range("residual_out", args.residual_out),
      byte_range("norm_out", args.norm_out),   code_range("quant_out", args.quant_out),
      byte_range("scale_out", args.scale_out), byte_range("row_scale_out", args.row_scale_out)};
  const std::array inputs{byte_range("input", args.input),
                          byte_range("residual_in", args.residual_in),
                          byte_range("gamma", args.gamma),
                          byte_range("global_scale", args.global_scale),
                          byte_range("moe.expert_rows", moe.expert_rows),
                          byte_range("moe.expert_scales", moe.expert_scales),
                          byte_range("moe.num_experts", moe.num_experts),
                          byte_range("moe.token_input", moe.token_input),
                          byte_range("moe.permuted_rows", moe.permuted_rows),
                          byte_range("moe.slot_to_row", moe.slot_to_row),
                          byte_range("moe.slot_weights", moe.slot_weights),
                          byte_range("moe.shared_expert", moe.shared_expert)};
  require_disjoint(outputs, {});
  for (const ByteRange& output : outputs) {
    for (const ByteRange& input : inputs) {
      if (!may_share(output, input)) require_disjoint({&output, 1}, {&input, 1});
    }
  }
}

}  // namespace

void check_allreduce_problem(const AllReduceProblem& problem) {
  check_enumerators(problem);
  if (!is_moe(problem.pattern) && problem.moe_quantization != Quantization::kNone) {
    throw_invalid("problem.moe_quantization: expected none, as pattern {} has its own, got {}",
                  name(problem.pattern), name(problem.moe_quantization));
  }
  check_element(problem);
  check_group(problem);
  check_extents(problem);
  check_layout(problem);
}

RankArgs lower_allreduce(const AllReduceProblem& problem, const AllReduceArgs& args,
                         Device device) {
  check_allreduce_problem(problem);
  require_enumerator("trigger", args.trigger, AllReduceTrigger::kAfterPush);
  if (!std::isfinite(args.eps) || args.eps < 0.0F) {
    throw_invalid("eps: expected a finite number >= 0, got {}", args.eps);
  }
  if (args.weight_bias != 0.0F && args.weight_bias != 1.0F) {
    throw_invalid("weight_bias: expected 0, or 1 for weights of 1 + gamma, got {}",
                  args.weight_bias);
  }
  TensorChecks checks(problem, device);
  RankArgs lowered;
  lowered.source = lower_source(checks, args);
  lowered.epilogue = lower_epilogue(checks, args);
  lowered.accumulation = problem.accumulation;
  check_overlap(args);
  return lowered;
}

}  // namespace narrowfloat
