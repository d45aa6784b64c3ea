// The calls that MoeLayer refuses: each message names the argument, the expectation and the given
// value, and nothing has been written.
#include "layers/moe/moe_checks.h"

#include <array>
#include <functional>
#include <limits>

#include <gtest/gtest.h>

#include "base/int_math.h"
#include "support/expect_error.h"
#include "support/moe_case.h"

namespace narrowfloat::testing {
namespace {

constexpr MoeShape kCheckedShape{
    .tokens = 3, .hidden = 256, .inter = 128, .experts = 4, .top_k = 2};

struct Refused {
  const char* what;
  MoeMode mode;
  std::function<void(MoeCase&)> change;
  std::vector<std::string> fragments;
};

void expect_prepare_refuses(const Refused& refused) {
  SCOPED_TRACE(refused.what);
  MoeCase layer_case(refused.mode, kCheckedShape, Activation::swiglu(), 1);
  refused.change(layer_case);
  expect_error(ErrorKind::kInvalidArgument, refused.fragments, [&] { (void)layer_case.prepare(); });
  expect_error(ErrorKind::kInvalidArgument, refused.fragments,
               [&] { (void)layer_case.prepare_reference({}); });
}

TEST(MoeChecks, PrepareRefusesConfigurationsThatCannotWork) {
  static float per_expert[3] = {1, 1, 1};
  const Refused cases[] = {
      {"hidden",
       MoeMode::kMxfp8,
       [](MoeCase& c) { c.config().hidden = 250; },
       {"config.hidden", "mxfp8", "multiple of 32", "250"}},
      {"inter",
       MoeMode::kFp8Block,
       [](MoeCase& c) { c.config().inter = 0; },
       {"config.inter", "multiple of 128", "0"}},
      {"a hidden size whose workspace has no 63-bit size",
       MoeMode::kBf16,
       [](MoeCase& c) { c.config().hidden = int64_t{1} << 60; },
       {"config.hidden", "at most 2^24", "1152921504606846976"}},
      {"offset",
       MoeMode::kBf16,
       [](MoeCase& c) { c.config().expert_offset = 1; },
       {"config.local_experts", "4 experts", "1 to 4"}},
      {"count",
       MoeMode::kBf16,
       [](MoeCase& c) { c.config().local_experts = 0; },
       {"config.local_experts"}},
      {"huge offset",
       MoeMode::kBf16,
       [](MoeCase& c) { c.config().expert_offset = 2147483647; },
       {"config.local_experts"}},
      {"shared",
       MoeMode::kBf16,
       [](MoeCase& c) {
         c.config().routing.shared_experts = 1;
         c.config().local_experts = 2;
       },
       {"shared_experts", "2 of 4"}},
      {"top_k", MoeMode::kBf16, [](MoeCase& c) { c.config().routing.top_k = 5; }, {"top_k", "5"}},
      {"out",
       MoeMode::kBf16,
       [](MoeCase& c) { c.config().out_dtype = DType::kF64; },
       {"config.out_dtype", "F64"}},
      {"slot",
       MoeMode::kBf16,
       [](MoeCase& c) { c.config().slot_dtype = DType::kF16; },
       {"config.slot_dtype", "F16"}},
      {"tile",
       MoeMode::kBf16,
       [](MoeCase& c) { c.config().token_tile = 24; },
       {"config.token_tile", "power of two", "24"}},
      {"on input",
       MoeMode::kBf16,
       [](MoeCase& c) { c.config().weight_on_input = true; },
       {"weight_on_input", "top_k 1", "2"}},
      {"w1 rows",
       MoeMode::kBf16,
       [](MoeCase& c) { c.weights().w1.values.shape[1] = 128; },
       {"weights.w1", "[4, 256, 256]"}},
      {"w1 type",
       MoeMode::kBf16,
       [](MoeCase& c) { c.weights().w1.values.dtype = DType::kF16; },
       {"weights.w1.values", "BF16", "F16"}},
      {"w2 cols",
       MoeMode::kNvfp4,
       [](MoeCase& c) { c.weights().w2.values.shape[2] = 32; },
       {"weights.w2", "[4, 256, 128]"}},
      {"up scale",
       MoeMode::kNvfp4Bf16,
       [](MoeCase& c) {
         c.weights().up_scale = PerExpert(TensorView::contiguous(per_expert, DType::kF32, {3}));
       },
       {"weights.up_scale", "4", "3"}},
      {"alpha",
       MoeMode::kBf16,
       [](MoeCase& c) {
         c.config().activation.alpha =
             PerExpert(TensorView::contiguous(per_expert, DType::kF32, {3}));
       },
       {"config.activation.alpha", "4", "3"}},
      {"multiplier",
       MoeMode::kNvfp4Bf16,
       [](MoeCase& c) { c.weights().inter_multiplier = 2.0F; },
       {"weights.inter_multiplier", "nvfp4_bf16"}},
      {"input multiplier",
       MoeMode::kBf16,
       [](MoeCase& c) { c.weights().input_multiplier = 2.0F; },
       {"weights.input_multiplier", "bf16"}},
      {"zero multiplier",
       MoeMode::kFp8Tensor,
       [](MoeCase& c) { c.weights().inter_multiplier = 0.0F; },
       {"weights.inter_multiplier", "> 0", "0"}},
      {"multiplier of an expert",
       MoeMode::kNvfp4,
       [](MoeCase& c) {
         static float each[4] = {1, 1, std::numeric_limits<float>::quiet_NaN(), 1};
         c.weights().inter_multiplier = PerExpert(TensorView::contiguous(each, DType::kF32, {4}));
       },
       {"weights.inter_multiplier", "finite", "nan"}},
      {"input multipliers of fewer experts",
       MoeMode::kNvfp4,
       [](MoeCase& c) {
         c.weights().input_multiplier =
             PerExpert(TensorView::contiguous(per_expert, DType::kF32, {3}));
       },
       {"weights.input_multiplier", "4", "3"}},
      {"infinite input multiplier",
       MoeMode::kNvfp4,
       [](MoeCase& c) { c.weights().input_multiplier = std::numeric_limits<float>::infinity(); },
       {"weights.input_multiplier", "finite", "inf"}},
      {"activation parameter",
       MoeMode::kBf16,
       [](MoeCase& c) { c.config().activation.limit_up = -1.0F; },
       {"activation.limit_up", "-1"}},
      {"gate order",
       MoeMode::kBf16,
       [](MoeCase& c) { c.config().gate_order = static_cast<GateOrder>(3); },
       {"gate order", "3"}},
      {"bias",
       MoeMode::kBf16,
       [](MoeCase& c) {
         c.weights().bias1 = TensorView::contiguous(per_expert, DType::kF32, {1, 3});
       },
       {"weights.bias1", "[4, 256]", "[1, 3]"}},
  };
  for (const Refused& refused : cases) expect_prepare_refuses(refused);
}

TEST(MoeChecks, AReferenceRefusesOptionsThatTheModeDoesNotHave) {
  const auto refuses = [](MoeMode mode, const MoeReferenceOptions& options,
                          const std::vector<std::string>& fragments) {
    MoeCase layer_case(mode, kCheckedShape, Activation::swiglu(), 1);
    expect_error(ErrorKind::kInvalidArgument, fragments,
                 [&] { (void)layer_case.prepare_reference(options); });
    expect_error(ErrorKind::kInvalidArgument, fragments,
                 [&] { (void)explain_moe_reference(layer_case.config(), options, 1); });
  };
  refuses(MoeMode::kNvfp4, {.fp32_rows = true}, {"reference.fp32_rows", "nvfp4"});
  refuses(MoeMode::kMxfp8, {.double_quantize_fc1 = true},
          {"reference.double_quantize_fc1", "mxfp8"});
  refuses(MoeMode::kBf16, {.accumulation = static_cast<Accumulation>(7)}, {"accumulation", "7"});
}

TEST(MoeChecks, OnlyTheCpuIsSupported) {
  if (build_has_cuda()) GTEST_SKIP() << "this build has implementations for CUDA";
  MoeCase layer_case(MoeMode::kBf16, kCheckedShape, Activation::swiglu(), 1);
  expect_error(ErrorKind::kUnsupported, {"device", "cuda:0"}, [&] {
    (void)MoeLayer::prepare(layer_case.weights(), layer_case.config(), {DeviceType::kCuda, 0});
  });
}

TEST(MoeChecks, AnActivationWithoutAGateHasNoGateScale) {
  MoeCase layer_case(MoeMode::kBf16, kCheckedShape, Activation::plain(ActivationKind::kRelu2), 1);
  layer_case.weights().gate_scale = 0.5F;
  expect_error(ErrorKind::kInvalidArgument, {"weights.gate_scale", "relu2"},
               [&] { (void)layer_case.prepare(); });
}

TEST(MoeChecks, AnEmptyLayerRefusesEverything) {
  const MoeLayer empty;
  const auto refuses = [](const std::function<void()>& call) {
    expect_error(ErrorKind::kInvalidArgument, {"layer", "empty", "prepare"}, call);
  };
  refuses([&] { (void)empty.config(); });
  refuses([&] { (void)empty.weight_bytes(); });
  refuses([&] { (void)empty.required_workspace(1); });
  refuses([&] { (void)empty.token_tile(1); });
  refuses([&] { (void)empty.max_rows(1); });
  MoeCase given(MoeMode::kBf16, kCheckedShape, Activation::swiglu(), 1);
  refuses([&] { empty.run(given.inputs(), given.routing(), {}, {}); });
}

// A call with everything in place, to be broken in one way.
class MoeCalls : public ::testing::Test {
 protected:
  void make(MoeMode mode) {
    layer_case_ = std::make_unique<MoeCase>(mode, kCheckedShape, Activation::swiglu(), 2);
    layer_.emplace(layer_case_->prepare());
    memory_.assign(static_cast<size_t>(layer_->required_workspace(3)) + 256, 0);
    out_.assign(3 * 256, 0xABCD);
    slots_.assign(static_cast<size_t>(layer_->max_rows(3) * 256), 0xABCD);
    auto* aligned =
        reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(memory_.data()) + 255) / 256 * 256);
    workspace_ = TensorView::contiguous(aligned, DType::kU8, {layer_->required_workspace(3)});
    outputs_ = {};
    outputs_.out = TensorView::contiguous(out_.data(), DType::kBF16, {3, 256});
    inputs_ = layer_case_->inputs();
    routing_ = layer_case_->routing();
  }
  void refuses(const std::vector<std::string>& fragments) {
    expect_error(ErrorKind::kInvalidArgument, fragments,
                 [&] { layer_->run(inputs_, routing_, outputs_, workspace_); });
    EXPECT_EQ(out_, std::vector<uint16_t>(3 * 256, 0xABCD));
  }

  std::unique_ptr<MoeCase> layer_case_;
  std::optional<MoeLayer> layer_;
  std::vector<uint8_t> memory_;
  std::vector<uint16_t> out_;
  std::vector<uint16_t> slots_;
  TensorView workspace_;
  MoeOutputs outputs_;
  MoeInputs inputs_;
  Routing routing_;
};

TEST_F(MoeCalls, RefuseInputsOfOtherShapesAndTypes) {
  make(MoeMode::kBf16);
  inputs_.values.shape[1] = 255;
  refuses({"inputs.values", "[3, 256]", "[3, 255]"});
  make(MoeMode::kBf16);
  inputs_.values.dtype = DType::kF16;
  refuses({"inputs.values", "BF16", "F16"});
  make(MoeMode::kBf16);
  inputs_.values.rank = 1;
  refuses({"inputs.values", "[tokens, 256]"});
  make(MoeMode::kMxfp8);
  inputs_.values.dtype = DType::kU8;
  refuses({"inputs.values", "F8_E4M3", "U8"});
  make(MoeMode::kMxfp8);
  inputs_.scales = inputs_.values;
  refuses({"inputs.scales", "unquantized BF16"});
  make(MoeMode::kMxfp8);
  inputs_.values.dtype = DType::kF8E4M3;
  refuses({"inputs.scales", "[3, 8]"});
  make(MoeMode::kNvfp4Bf16);
  inputs_.row_scale = inputs_.values;
  refuses({"inputs.row_scale", "unquantized BF16"});
  make(MoeMode::kBf16);
  inputs_.values.data = nullptr;
  refuses({"inputs.values", "null"});
}

TEST_F(MoeCalls, RefusePlainRowsWithoutAMultiplier) {
  make(MoeMode::kNvfp4);
  layer_case_->weights().input_multiplier.reset();
  layer_.emplace(layer_case_->prepare());
  refuses({"inputs.values", "input_multiplier"});
}

TEST_F(MoeCalls, RefuseRoutingForOtherTokens) {
  make(MoeMode::kBf16);
  routing_.logits.shape[0] = 2;
  refuses({"routing.logits", "3 tokens", "[2, 4]"});
  make(MoeMode::kBf16);
  routing_ = {};
  refuses({"routing: expected logits, packed or ids, got none"});
  make(MoeMode::kBf16);
  const int32_t ids[6] = {0, 1, 2, 4, 1, 0};
  routing_ = {};
  routing_.ids = TensorView::contiguous(ids, DType::kI32, {3, 2});
  refuses({"routing.ids", "4"});
}

TEST_F(MoeCalls, RefuseOutputsThatDoNotFit) {
  make(MoeMode::kBf16);
  outputs_.out = {};
  refuses({"outputs.out", "slot_out"});
  make(MoeMode::kBf16);
  outputs_.out.dtype = DType::kF16;
  refuses({"outputs.out", "BF16", "F16"});
  make(MoeMode::kBf16);
  outputs_.out.shape[1] = 257;
  refuses({"outputs.out", "at most 256", "257"});
  make(MoeMode::kBf16);
  outputs_.slot_out =
      TensorView::contiguous(slots_.data(), DType::kBF16, {layer_->max_rows(3) - 1, 256});
  refuses({"outputs.slot_out"});
  make(MoeMode::kBf16);
  outputs_.topk_ids = TensorView::contiguous(slots_.data(), DType::kI32, {3, 3});
  refuses({"outputs.topk_ids", "[3, 2]", "[3, 3]"});
  make(MoeMode::kBf16);
  outputs_.expert_weights = TensorView::contiguous(slots_.data(), DType::kBF16, {3, 2});
  refuses({"outputs.expert_weights", "F32"});
  make(MoeMode::kBf16);
  outputs_.slot_to_row = TensorView::contiguous(slots_.data(), DType::kI32, {5});
  refuses({"outputs.slot_to_row", "6"});
}

TEST_F(MoeCalls, RefuseBuffersThatOverlap) {
  make(MoeMode::kBf16);
  outputs_.out.data = inputs_.values.data;
  refuses({"outputs.out", "overlaps", "inputs.values"});
  make(MoeMode::kBf16);
  outputs_.out.data = workspace_.data;
  refuses({"outputs.out", "overlaps", "workspace"});
}

// A call of quantized rows on a GPU that only the checks see: its memory is the host's.
class MoeCallsOnAGpu : public ::testing::Test {
 protected:
  MoeCallsOnAGpu() {
    inputs_.values = view(DType::kF8E4M3, {3, kCheckedShape.hidden});
    routing_.logits = view(DType::kF32, {3, kCheckedShape.experts});
    outputs_.out = view(DType::kBF16, {3, kCheckedShape.hidden});
    outputs_.slot_out = view(DType::kBF16, {plan_.permutation().max_rows, kCheckedShape.hidden});
    workspace_ = view(DType::kU8, {plan_.workspace_bytes()});
  }
  TensorView view(DType dtype, std::initializer_list<int64_t> shape) {
    TensorView result = TensorView::contiguous(nullptr, dtype, shape, kDevice);
    result.data = memory_.data() + used_;
    used_ += round_up(result.num_elements() * bits(dtype) / 8, kWorkspaceAlignment);
    EXPECT_LE(used_, static_cast<int64_t>(memory_.size()));
    return result;
  }
  void check() {
    const MoeCall call{inputs_, routing_, outputs_, workspace_, 3};
    check_moe_call(call, layer_case_.config(), plan_, extents_, true, kDevice);
  }
  void refuses(const std::vector<std::string>& fragments) {
    expect_error(ErrorKind::kInvalidArgument, fragments, [&] { check(); });
  }

  static constexpr Device kDevice{DeviceType::kCuda, 0};
  MoeCase layer_case_{MoeMode::kFp8Tensor, kCheckedShape, Activation::swiglu(), 2};
  MoeExtents extents_ = moe_extents(layer_case_.config());
  MoePlan plan_{extents_, 3, 8, {}};
  alignas(kWorkspaceAlignment) std::array<std::byte, size_t{1} << 19> memory_{};
  int64_t used_ = 0;
  MoeInputs inputs_;
  Routing routing_;
  MoeOutputs outputs_;
  TensorView workspace_;
};

void move_by(TensorView& view, int64_t bytes) {
  view.data = static_cast<std::byte*>(view.data) + bytes;
}

TEST_F(MoeCallsOnAGpu, NeedAlignedBuffers) {
  EXPECT_NO_THROW(check());
  move_by(inputs_.values, 8);
  refuses({"inputs.values", "16 bytes", "cuda:0"});
  move_by(inputs_.values, -8);
  move_by(outputs_.slot_out, 2);
  refuses({"outputs.slot_out", "16 bytes"});
  move_by(outputs_.slot_out, -2);
  move_by(outputs_.out, 4);
  refuses({"outputs.out", "16 bytes"});
}

TEST_F(MoeCallsOnAGpu, NeedAlignedRowsOfOut) {
  outputs_.out = view(DType::kBF16, {3, 248});
  EXPECT_NO_THROW(check());
  outputs_.out = view(DType::kBF16, {3, 250});
  refuses({"outputs.out", "multiple of 16 bytes", "500"});
}

TEST(MoeChecks, ADeviceThatDoesNotExistIsRefusedWithTheReason) {
  MoeCase layer_case(MoeMode::kBf16, kCheckedShape, Activation::swiglu(), 1);
  expect_error(ErrorKind::kUnsupported, {"device", "cuda:77", "CUDA"}, [&] {
    (void)MoeLayer::prepare(layer_case.weights(), layer_case.config(), {DeviceType::kCuda, 77});
  });
}

}  // namespace
}  // namespace narrowfloat::testing
