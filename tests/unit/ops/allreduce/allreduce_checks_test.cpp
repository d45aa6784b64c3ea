// Every rule of the arguments: one call that breaks it, and the message.
#include "ops/allreduce/allreduce_checks.h"

#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/allreduce_ranks.h"
#include "support/expect_error.h"
#include "support/special_floats.h"

namespace narrowfloat::testing {
namespace {

// A call that passes, with tensors in memory that is never read.
class Call {
 public:
  explicit Call(AllReduceProblem wanted)
      : problem(wanted),
        tensors_(random_inputs(wanted, 1, Fill::kZeros, 1), 0),
        args(tensors_.args()) {}

  void expect(const std::vector<std::string>& fragments, Device device = {}) const {
    expect_error(kInvalid, fragments, [&] { lower_allreduce(problem, args, device); });
  }
  [[nodiscard]] RankArgs lower() const { return lower_allreduce(problem, args, Device{}); }

  AllReduceProblem problem;

 private:
  RankTensors tensors_;

 public:
  AllReduceArgs args;
};

AllReduceProblem problem_of(AllReducePattern pattern) {
  AllReduceProblem problem{.tokens = 5, .hidden = 64, .pattern = pattern};
  if (quantization_of(problem) == AllReduceQuantization::kFp8GroupUe8m0) problem.group = 16;
  return problem;
}

TEST(AllReduceChecks, PassEveryPattern) {
  for (int i = 0; i < kNumAllReducePatterns; ++i) {
    const AllReduceProblem problem = problem_of(static_cast<AllReducePattern>(i));
    const Call call(problem);
    const RankArgs lowered = call.lower();
    EXPECT_EQ(lowered.epilogue.quantization, quantization_of(problem));
    EXPECT_EQ(lowered.epilogue.has_norm, has_norm(problem.pattern));
    EXPECT_EQ(lowered.source.kind, source_of(problem.pattern));
    EXPECT_EQ(lowered.epilogue.residual_in, call.args.residual_in.data);
    EXPECT_EQ(lowered.epilogue.quant_out, call.args.quant_out.data);
  }
}

TEST(AllReduceChecks, LowerScalesOfTokensAndRows) {
  const Call token(problem_of(AllReducePattern::kFp8Token));
  EXPECT_EQ(token.lower().epilogue.row_scale_out, token.args.scale_out.data);
  const Call row(problem_of(AllReducePattern::kNvfp4PerToken));
  EXPECT_EQ(row.lower().epilogue.row_scale_out, row.args.row_scale_out.data);
  EXPECT_EQ(row.lower().epilogue.scale_words, 128);
  EXPECT_EQ(row.lower().epilogue.scale_extents.blocks, 4);
}

// ---- The problem

struct ProblemCase {
  std::function<void(AllReduceProblem&)> change;
  std::vector<std::string> fragments;
};

TEST(AllReduceChecks, RefuseProblems) {
  using Problem = AllReduceProblem;
  const auto pattern = [](AllReducePattern value) {
    return [value](Problem& p) { p.pattern = value; };
  };
  const std::vector<ProblemCase> cases{
      {pattern(static_cast<AllReducePattern>(20)), {"problem.pattern", "0 to 19", "20"}},
      {pattern(static_cast<AllReducePattern>(-1)), {"problem.pattern", "-1"}},
      {[](Problem& p) { p.moe_quantization = static_cast<AllReduceQuantization>(9); },
       {"moe_quantization", "0 to 8", "9"}},
      {[](Problem& p) { p.moe_quantization = AllReduceQuantization::kMxfp8; },
       {"moe_quantization", "expected none", "allreduce", "mxfp8"}},
      {[](Problem& p) { p.scale_layout = static_cast<ScaleLayoutId>(4); }, {"scale_layout", "4"}},
      {[](Problem& p) { p.scale_layout = ScaleLayoutId::kLinear; },
       {"scale_layout", "swizzled_128x4", "linear"}},
      {[](Problem& p) {
         p.pattern = AllReducePattern::kNvfp4;
         p.scale_layout = ScaleLayoutId::kMnMajor;
       },
       {"scale_layout", "swizzled_8x4", "nvfp4", "mn_major"}},
      {[](Problem& p) { p.accumulation = static_cast<AllReduceAccumulation>(2); },
       {"accumulation", "2"}},
      {[](Problem& p) { p.exactness = static_cast<AllReduceExactness>(2); }, {"exactness", "2"}},
      {[](Problem& p) { p.algorithm = static_cast<AllReduceAlgorithm>(6); }, {"algorithm", "6"}},
      {[](Problem& p) { p.element = DType::kI32; }, {"element", "F16, BF16 or F32", "I32"}},
      {[](Problem& p) {
         p.element = DType::kF32;
         p.pattern = AllReducePattern::kMoeFinalize;
       },
       {"element", "F16 or BF16", "moe_finalize", "F32"}},
      {[](Problem& p) { p.group = 32; }, {"group", "expected 0", "allreduce", "32"}},
      {[](Problem& p) {
         p.pattern = AllReducePattern::kFp8Group;
         p.group = 48;
       },
       {"group", "16, 32, 64, 128 or 256", "48"}},
      {pattern(AllReducePattern::kNormFp8Group), {"group", "got 0"}},
      {[](Problem& p) { p.tokens = -1; }, {"tokens", "-1"}},
      {[](Problem& p) { p.hidden = 0; }, {"hidden", "multiple of 8", "0"}},
      {[](Problem& p) { p.hidden = 12; }, {"hidden", "multiple of 8", "12"}},
      {[](Problem& p) {
         p.hidden = 24;
         p.pattern = AllReducePattern::kNvfp4;
       },
       {"hidden", "multiple of 16", "nvfp4", "24"}},
      {[](Problem& p) {
         p.hidden = 24;
         p.pattern = AllReducePattern::kNormNvfp4PerToken;
       },
       {"hidden", "multiple of 16", "24"}},
      {[](Problem& p) {
         p.hidden = 48;
         p.pattern = AllReducePattern::kMxfp4;
       },
       {"hidden", "multiple of 32", "48"}},
      {[](Problem& p) {
         p.hidden = 48;
         p.pattern = AllReducePattern::kMxfp8;
       },
       {"hidden", "multiple of 32", "48"}},
      {[](Problem& p) {
         p.hidden = 64;
         p.group = 128;
         p.pattern = AllReducePattern::kFp8Group;
       },
       {"hidden", "multiple of 128", "64"}},
      {[](Problem& p) { p.tokens = INT64_MAX; }, {"tokens * hidden", "2^58"}},
      {[](Problem& p) { p.tokens = int64_t{1} << 53; }, {"tokens * hidden", "2^58"}},
      {[](Problem& p) {
         p.tokens = 1;
         p.hidden = int64_t{1} << 60;
       },
       {"tokens * hidden"}}};
  for (const ProblemCase& one : cases) {
    AllReduceProblem problem{.tokens = 5, .hidden = 64};
    one.change(problem);
    expect_error(kInvalid, one.fragments, [&] { check_allreduce_problem(problem); });
  }
  check_allreduce_problem({.tokens = int64_t{1} << 52, .hidden = 64});
  check_allreduce_problem({.tokens = 0, .hidden = 8});
}

// ---- Tensors

using View = TensorView AllReduceArgs::*;
using MoeView = TensorView AllReduceMoe::*;

struct Required {
  AllReducePattern pattern;
  View view;
  std::string name;
};

TEST(AllReduceChecks, RefuseAnAbsentTensor) {
  using Pattern = AllReducePattern;
  using Args = AllReduceArgs;
  for (const Required& one :
       std::vector<Required>{{Pattern::kAllReduce, &Args::input, "input"},
                             {Pattern::kAllReduce, &Args::ar_out, "ar_out"},
                             {Pattern::kResidualRmsNorm, &Args::residual_in, "residual_in"},
                             {Pattern::kResidualRmsNorm, &Args::residual_out, "residual_out"},
                             {Pattern::kResidualRmsNorm, &Args::gamma, "gamma"},
                             {Pattern::kResidualRmsNorm, &Args::norm_out, "norm_out"},
                             {Pattern::kNormFp8, &Args::norm_out, "norm_out"},
                             {Pattern::kFp8, &Args::quant_out, "quant_out"},
                             {Pattern::kFp8, &Args::global_scale, "global_scale"},
                             {Pattern::kNvfp4, &Args::global_scale, "global_scale"},
                             {Pattern::kNvfp4, &Args::scale_out, "scale_out"},
                             {Pattern::kFp8Group, &Args::scale_out, "scale_out"},
                             {Pattern::kFp8Token, &Args::scale_out, "scale_out"},
                             {Pattern::kFp8Block, &Args::scale_out, "scale_out"},
                             {Pattern::kNvfp4PerToken, &Args::row_scale_out, "row_scale_out"},
                             {Pattern::kMoeReduction, &Args::residual_in, "residual_in"},
                             {Pattern::kMoeFinalize, &Args::gamma, "gamma"}}) {
    Call call(problem_of(one.pattern));
    call.args.*one.view = {};
    call.expect({one.name, "needs it", std::string(name(one.pattern))});
  }
}

TEST(AllReduceChecks, RefuseAnAbsentTensorOfAMoePattern) {
  struct Case {
    AllReducePattern pattern;
    MoeView view;
    std::string name;
  };
  using Moe = AllReduceMoe;
  for (const Case& one : std::vector<Case>{
           {AllReducePattern::kMoeReduction, &Moe::expert_rows, "moe.expert_rows"},
           {AllReducePattern::kMoeReduction, &Moe::expert_scales, "moe.expert_scales"},
           {AllReducePattern::kMoeReduction, &Moe::token_input, "moe.token_input"},
           {AllReducePattern::kMoeFinalize, &Moe::permuted_rows, "moe.permuted_rows"},
           {AllReducePattern::kMoeFinalize, &Moe::slot_to_row, "moe.slot_to_row"}}) {
    Call call(problem_of(one.pattern));
    call.args.moe.*one.view = {};
    call.expect({one.name, "needs it"});
  }
}

TEST(AllReduceChecks, RefuseATensorThatThePatternDoesNotUse) {
  using Pattern = AllReducePattern;
  using Args = AllReduceArgs;
  for (const Required& one :
       std::vector<Required>{{Pattern::kAllReduce, &Args::residual_in, "residual_in"},
                             {Pattern::kAllReduce, &Args::residual_out, "residual_out"},
                             {Pattern::kAllReduce, &Args::gamma, "gamma"},
                             {Pattern::kAllReduce, &Args::norm_out, "norm_out"},
                             {Pattern::kAllReduce, &Args::quant_out, "quant_out"},
                             {Pattern::kResidualRmsNorm, &Args::ar_out, "ar_out"},
                             {Pattern::kResidualRmsNorm, &Args::quant_out, "quant_out"},
                             {Pattern::kFp8, &Args::norm_out, "norm_out"},
                             {Pattern::kFp8, &Args::scale_out, "scale_out"},
                             {Pattern::kFp8, &Args::row_scale_out, "row_scale_out"},
                             {Pattern::kFp8Token, &Args::global_scale, "global_scale"},
                             {Pattern::kMxfp8, &Args::global_scale, "global_scale"},
                             {Pattern::kMoeReduction, &Args::input, "input"},
                             {Pattern::kMoeFinalize, &Args::quant_out, "quant_out"}}) {
    Call call(problem_of(one.pattern));
    ASSERT_TRUE((call.args.*one.view).is_absent());
    const std::vector<float> other(5 * 64);
    call.args.*one.view = TensorView::contiguous(other.data(), DType::kBF16, {5, 64});
    call.expect({one.name, "does not use it", std::string(name(one.pattern)), "BF16[5, 64]"});
  }
  for (const MoeView view :
       {&AllReduceMoe::expert_rows, &AllReduceMoe::expert_scales, &AllReduceMoe::num_experts,
        &AllReduceMoe::token_input, &AllReduceMoe::permuted_rows, &AllReduceMoe::slot_to_row,
        &AllReduceMoe::slot_weights, &AllReduceMoe::shared_expert}) {
    Call call(problem_of(Pattern::kFp8));
    call.args.moe.*view = call.args.input;
    call.expect({"moe.", "does not use it", "fp8"});
  }
}

TEST(AllReduceChecks, WantOneOutputOfAMoePattern) {
  Call call(problem_of(AllReducePattern::kMoeFinalize));
  call.args.residual_out = {};
  call.args.norm_out = {};
  EXPECT_NE(call.lower().epilogue.ar_out, nullptr);
  call.args.ar_out = {};
  call.expect({"at least one", "moe_finalize"});
}

struct ViewCase {
  AllReducePattern pattern;
  std::function<void(AllReduceArgs&)> change;
  std::vector<std::string> fragments;
};

TEST(AllReduceChecks, RefuseTensorsOfOtherTypesShapesAndStrides) {
  using Pattern = AllReducePattern;
  using Args = AllReduceArgs;
  const std::vector<ViewCase> cases{
      {Pattern::kAllReduce, [](Args& a) { a.input.dtype = DType::kF16; }, {"input", "BF16", "F16"}},
      {Pattern::kAllReduce, [](Args& a) { a.input.shape[0] = 4; }, {"input", "[5, 64]"}},
      {Pattern::kAllReduce, [](Args& a) { a.input.strides[0] = 72; }, {"input", "dense", "72"}},
      {Pattern::kAllReduce, [](Args& a) { a.input.data = nullptr; }, {"input", "null"}},
      {Pattern::kAllReduce,
       [](Args& a) { a.input.data = static_cast<char*>(a.input.data) + 1; },
       {"input", "aligned to 2"}},
      {Pattern::kAllReduce,
       [](Args& a) {
         a.input.device = {DeviceType::kCuda, 1};
       },
       {"input", "device", "cuda:1"}},
      {Pattern::kAllReduce, [](Args& a) { a.ar_out.rank = 1; }, {"ar_out", "[5, 64]"}},
      {Pattern::kFp8, [](Args& a) { a.residual_in.shape[1] = 32; }, {"residual_in", "[5, 64]"}},
      {Pattern::kFp8,
       [](Args& a) { a.residual_out.dtype = DType::kF32; },
       {"residual_out", "BF16", "F32"}},
      {Pattern::kFp8, [](Args& a) { a.gamma.shape[0] = 63; }, {"gamma", "[64]"}},
      {Pattern::kNormFp8, [](Args& a) { a.norm_out.shape[0] = 6; }, {"norm_out", "[5, 64]"}},
      {Pattern::kFp8,
       [](Args& a) { a.quant_out.dtype = DType::kF8E5M2; },
       {"quant_out", "F8_E4M3 or U8", "F8_E5M2"}},
      {Pattern::kFp8, [](Args& a) { a.quant_out.shape[1] = 32; }, {"quant_out", "[5, 64]"}},
      {Pattern::kNvfp4, [](Args& a) { a.quant_out.shape[1] = 64; }, {"quant_out", "[5, 32]"}},
      {Pattern::kMxfp4,
       [](Args& a) { a.quant_out.dtype = DType::kF8E4M3; },
       {"quant_out", "F4 or U8"}},
      {Pattern::kFp8,
       [](Args& a) { a.global_scale.dtype = DType::kF64; },
       {"global_scale", "F32", "F64"}},
      {Pattern::kFp8, [](Args& a) { a.global_scale.shape[0] = 2; }, {"global_scale", "1 values"}},
      {Pattern::kNvfp4,
       [](Args& a) { a.scale_out.shape[0] = 511; },
       {"scale_out", "512 values", "511"}},
      {Pattern::kNvfp4,
       [](Args& a) { a.scale_out.dtype = DType::kF8E8M0; },
       {"scale_out", "U8 or F8_E4M3"}},
      {Pattern::kMxfp8,
       [](Args& a) { a.scale_out.dtype = DType::kF8E4M3; },
       {"scale_out", "U8 or F8_E8M0"}},
      {Pattern::kNvfp4PerToken,
       [](Args& a) { a.row_scale_out.shape[0] = 4; },
       {"row_scale_out", "5 values"}},
      {Pattern::kFp8Token, [](Args& a) { a.scale_out.dtype = DType::kF16; }, {"scale_out", "F32"}},
      {Pattern::kFp8Token, [](Args& a) { a.scale_out.shape[0] = 6; }, {"scale_out", "5 values"}},
      {Pattern::kFp8Block, [](Args& a) { a.scale_out.shape[1] = 2; }, {"scale_out", "[5, 1]"}},
      {Pattern::kFp8Group, [](Args& a) { a.scale_out.dtype = DType::kF32; }, {"scale_out", "I32"}},
      {Pattern::kFp8Group,
       [](Args& a) { a.scale_out.shape[0] = 4; },
       {"scale_out", "5 to 8 words", "4 groups"}},
      {Pattern::kFp8Group, [](Args& a) { a.scale_out.shape[0] = 9; }, {"scale_out", "5 to 8"}},
      {Pattern::kMoeReduction,
       [](Args& a) { a.moe.expert_rows.shape[1] = 4; },
       {"moe.expert_rows", "5, 64]"}},
      {Pattern::kMoeReduction,
       [](Args& a) { a.moe.expert_scales.shape[0] += 1; },
       {"moe.expert_scales", "5]"}},
      {Pattern::kMoeReduction,
       [](Args& a) { a.moe.token_input.shape[0] = 4; },
       {"moe.token_input", "[5, 64]"}},
      {Pattern::kMoeReduction,
       [](Args& a) {
         a.moe.num_experts = a.moe.expert_scales;
         a.moe.num_experts.dtype = DType::kI64;
       },
       {"moe.num_experts", "I32", "I64"}},
      {Pattern::kMoeFinalize,
       [](Args& a) { a.moe.permuted_rows.shape[1] = 32; },
       {"moe.permuted_rows", "64]"}},
      {Pattern::kMoeFinalize,
       [](Args& a) { a.moe.slot_to_row.shape[0] = 4; },
       {"moe.slot_to_row", "[5, "}},
      {Pattern::kMoeFinalize,
       [](Args& a) { a.moe.slot_to_row.dtype = DType::kI64; },
       {"moe.slot_to_row", "I32"}},
      {Pattern::kMoeFinalize,
       [](Args& a) {
         a.moe.slot_weights = a.moe.slot_to_row;
         a.moe.slot_weights.dtype = DType::kF16;
       },
       {"moe.slot_weights", "F32 or BF16", "F16"}},
      {Pattern::kMoeFinalize,
       [](Args& a) {
         a.moe.shared_expert = a.residual_in;
         a.moe.shared_expert.shape[0] = 4;
       },
       {"moe.shared_expert", "[5, 64]"}}};
  for (const ViewCase& one : cases) {
    SCOPED_TRACE(one.fragments[0]);
    Call call(problem_of(one.pattern));
    one.change(call.args);
    call.expect(one.fragments);
  }
}

// On GPUs every tensor starts at a multiple of 16 bytes.
TEST(AllReduceChecks, WantAlignedTensorsOnGpus) {
  const Device gpu{DeviceType::kCuda, 0};
  const auto views = [](AllReduceArgs& args) {
    std::vector<std::pair<std::string, TensorView*>> all{
        {"input", &args.input},
        {"residual_in", &args.residual_in},
        {"gamma", &args.gamma},
        {"ar_out", &args.ar_out},
        {"residual_out", &args.residual_out},
        {"norm_out", &args.norm_out},
        {"quant_out", &args.quant_out},
        {"scale_out", &args.scale_out},
        {"row_scale_out", &args.row_scale_out},
        {"global_scale", &args.global_scale},
        {"moe.expert_rows", &args.moe.expert_rows},
        {"moe.expert_scales", &args.moe.expert_scales},
        {"moe.num_experts", &args.moe.num_experts},
        {"moe.token_input", &args.moe.token_input},
        {"moe.permuted_rows", &args.moe.permuted_rows},
        {"moe.slot_to_row", &args.moe.slot_to_row},
        {"moe.slot_weights", &args.moe.slot_weights},
        {"moe.shared_expert", &args.moe.shared_expert}};
    std::erase_if(all, [](const auto& view) { return view.second->is_absent(); });
    for (auto& view : all) view.second->device = {DeviceType::kCuda, 0};
    return all;
  };
  for (int i = 0; i < kNumAllReducePatterns; ++i) {
    Call call(problem_of(static_cast<AllReducePattern>(i)));
    for (const auto& [name, view] : views(call.args)) {
      void* const data = view->data;
      view->data = static_cast<char*>(data) + 8;
      call.expect({name, "16 bytes"}, gpu);
      view->data = data;
    }
    EXPECT_NO_THROW(lower_allreduce(call.problem, call.args, gpu));
  }
}

TEST(AllReduceChecks, TakeTheTransposedViewOfGroupScales) {
  AllReduceProblem problem = problem_of(AllReducePattern::kFp8Group);
  problem.hidden = 128;
  Call call(problem);
  const std::vector<int32_t> words(16);
  TensorView view = TensorView::contiguous(words.data(), DType::kI32, {5, 2});
  view.strides = {1, 8};
  call.args.scale_out = view;
  EXPECT_EQ(call.lower().epilogue.scale_words, 13);
  view.strides = {1, 5};
  call.args.scale_out = view;
  call.expect({"scale_out", "13 to 16 words"});
}

TEST(AllReduceChecks, RefuseNumbersOutOfRange) {
  const auto refuse = [](auto&& change, const std::vector<std::string>& fragments) {
    Call call(problem_of(AllReducePattern::kNormFp8));
    change(call.args);
    call.expect(fragments);
  };
  refuse([](AllReduceArgs& a) { a.eps = -1e-6F; }, {"eps", ">= 0"});
  refuse([](AllReduceArgs& a) { a.eps = kFloatNan; }, {"eps", "nan"});
  refuse([](AllReduceArgs& a) { a.eps = kFloatInfinity; }, {"eps", "inf"});
  refuse([](AllReduceArgs& a) { a.weight_bias = 0.5F; }, {"weight_bias", "0.5"});
  refuse([](AllReduceArgs& a) { a.weight_bias = kFloatNan; }, {"weight_bias", "nan"});
  refuse([](AllReduceArgs& a) { a.trigger = static_cast<AllReduceTrigger>(2); }, {"trigger", "2"});
  refuse([](AllReduceArgs& a) { a.moe.routed_scaling = 2.0F; },
         {"moe.routed_scaling", "expected 1", "2"});
  Call call(problem_of(AllReducePattern::kMoeFinalize));
  call.args.moe.routed_scaling = kFloatInfinity;
  call.expect({"moe.routed_scaling", "finite"});
}

// ---- Overlaps

TEST(AllReduceChecks, LetOutputsTakeThePlaceOfTheInput) {
  Call call(problem_of(AllReducePattern::kNormFp8));
  call.args.residual_out = call.args.residual_in;
  call.args.norm_out = call.args.input;
  EXPECT_NO_THROW(static_cast<void>(call.lower()));
  call.args.residual_out = call.args.input;
  call.expect({"overlaps"});
  call = Call(problem_of(AllReducePattern::kAllReduce));
  call.args.ar_out = call.args.input;
  EXPECT_NO_THROW(static_cast<void>(call.lower()));
}

TEST(AllReduceChecks, RefuseOtherOverlaps) {
  const auto refuse = [](AllReducePattern pattern, auto&& change,
                         const std::vector<std::string>& fragments) {
    Call call(problem_of(pattern));
    change(call.args);
    call.expect(fragments);
  };
  const auto moved = [](TensorView view, int64_t bytes) {
    view.data = static_cast<char*>(view.data) + bytes;
    return view;
  };
  using Pattern = AllReducePattern;
  using Args = AllReduceArgs;
  refuse(Pattern::kAllReduce, [&](Args& a) { a.ar_out = moved(a.input, 16); },
         {"ar_out", "overlaps input"});
  refuse(Pattern::kFp8, [&](Args& a) { a.residual_out = moved(a.residual_in, -16); },
         {"residual_out", "overlaps residual_in"});
  refuse(Pattern::kNormFp8, [](Args& a) { a.norm_out = a.residual_in; },
         {"norm_out", "overlaps residual_in"});
  refuse(Pattern::kNormFp8, [](Args& a) { a.norm_out = a.residual_out; },
         {"residual_out", "overlaps norm_out"});
  refuse(Pattern::kFp8, [](Args& a) { a.quant_out.data = a.input.data; },
         {"quant_out", "overlaps input"});
  refuse(Pattern::kFp8, [](Args& a) { a.quant_out.data = a.gamma.data; },
         {"quant_out", "overlaps gamma"});
  refuse(Pattern::kFp8Token, [](Args& a) { a.scale_out.data = a.quant_out.data; },
         {"quant_out", "overlaps scale_out"});
  refuse(Pattern::kFp8, [](Args& a) { a.global_scale.data = a.residual_out.data; },
         {"residual_out", "overlaps global_scale"});
  refuse(Pattern::kMxfp4,
         [](Args& a) {
           // The last byte of the codes: a view of F4 counts bytes here.
           a.scale_out.data = static_cast<char*>(a.quant_out.data) + 5 * 32 - 1;
         },
         {"quant_out", "overlaps scale_out"});
  refuse(Pattern::kMoeFinalize, [](Args& a) { a.ar_out.data = a.moe.permuted_rows.data; },
         {"ar_out", "overlaps moe.permuted_rows"});
  refuse(Pattern::kMoeReduction, [](Args& a) { a.residual_out = a.moe.token_input; },
         {"residual_out", "overlaps moe.token_input"});
}

}  // namespace
}  // namespace narrowfloat::testing
