// Arguments of route() that cannot work, each named in its message; nothing is written.
#include <functional>

#include <gtest/gtest.h>

#include "narrowfloat/error.h"
#include "narrowfloat/route.h"
#include "ops/route/route_problem.h"
#include "support/expect_error.h"
#include "support/tensors.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kTokens = 3;
constexpr int64_t kExperts = 8;
constexpr int64_t kTopK = 2;

// A call that works, for a test to break.
struct RouteCall {
  Matrix logits =
      Matrix::filled({.dtype = DType::kF32, .rows = kTokens, .cols = kExperts}, Fill::kNormal, 1);
  Vector bias = Vector::of(DType::kF32, std::vector<float>(kExperts, 0.0F));
  Vector precomputed = Vector::of(DType::kI32, std::vector<int32_t>(kTokens* kTopK, 1));
  Vector given_weights = Vector::of(DType::kF32, std::vector<float>(kTokens* kTopK, 1.0F));
  GuardedBuffer ids{kTokens * kTopK * 4, {.poison = 0xFF}};
  GuardedBuffer weights{kTokens * kTopK * 4, {.poison = 0xFF}};
  GuardedBuffer replay{kTokens * kTopK * 2, {.poison = 0xFF}};
  RoutingConfig config{.experts = kExperts, .top_k = kTopK};
  Routing routing;
  RouteOutputs outputs;

  RouteCall() {
    routing.logits = logits.view();
    outputs.ids = TensorView::contiguous(ids.data(), DType::kI32, {kTokens, kTopK});
    outputs.weights = TensorView::contiguous(weights.data(), DType::kF32, {kTokens, kTopK});
    outputs.replay = TensorView::contiguous(replay.data(), DType::kI16, {kTokens, kTopK});
  }
  [[nodiscard]] TensorView given(const Vector& vector, DType dtype) const {
    return TensorView::contiguous(vector.buffer().data(), dtype, {kTokens, kTopK});
  }
  void use_ids() {
    routing.logits = {};
    routing.ids = given(precomputed, DType::kI32);
    routing.weights = given(given_weights, DType::kF32);
  }
  void use_packed() {
    routing.logits = {};
    routing.packed = given(precomputed, DType::kI32);
  }
};

void expect_refused(const std::vector<std::string>& fragments,
                    const std::function<void(RouteCall&)>& change) {
  RouteCall call;
  change(call);
  expect_error(ErrorKind::kInvalidArgument, fragments,
               [&] { route(call.routing, call.config, call.outputs); });
  for (const GuardedBuffer* buffer : {&call.ids, &call.weights, &call.replay}) {
    const std::vector<uint8_t> untouched(static_cast<size_t>(buffer->size()), 0xFF);
    EXPECT_EQ(buffer->copy(), untouched) << fragments[0];
  }
}

TEST(RouteChecks, TheCallsThatTestsBreakWork) {
  RouteCall logits;
  EXPECT_NO_THROW(route(logits.routing, logits.config, logits.outputs));
  RouteCall ids;
  ids.use_ids();
  EXPECT_NO_THROW(route(ids.routing, ids.config, ids.outputs));
  RouteCall packed;
  packed.use_packed();
  packed.config.options.negative_one_is_empty = true;
  EXPECT_NO_THROW(route(packed.routing, packed.config, packed.outputs));
}

TEST(RouteChecks, ExactlyOneInputIsNeeded) {
  expect_refused({"routing", "exactly one of logits, packed and ids", "none"},
                 [](RouteCall& call) { call.routing = {}; });
  expect_refused({"exactly one", "logits ids"}, [](RouteCall& call) {
    call.routing.ids = call.given(call.precomputed, DType::kI32);
  });
  expect_refused({"exactly one", "packed ids"}, [](RouteCall& call) {
    call.use_packed();
    call.routing.ids = call.routing.packed;
  });
}

TEST(RouteChecks, WhatBelongsToAnotherInputIsRefused) {
  expect_refused({"routing.weights", "with ids only"}, [](RouteCall& call) {
    call.routing.weights = call.given(call.given_weights, DType::kF32);
  });
  expect_refused({"routing.weights", "with ids only"}, [](RouteCall& call) {
    call.use_packed();
    call.routing.weights = call.given(call.given_weights, DType::kF32);
  });
  expect_refused({"routing.bias", "precomputed"}, [](RouteCall& call) {
    call.use_ids();
    call.routing.bias = call.bias.view();
  });
  expect_refused({"routing.bias", "renormalize", "no bias"},
                 [](RouteCall& call) { call.routing.bias = call.bias.view(); });
}

TEST(RouteChecks, TheConfigurationIsChecked) {
  expect_refused({"config.top_k", "got 9"}, [](RouteCall& call) { call.config.top_k = 9; });
}

TEST(RouteChecks, InputsMustHaveTheirTypeAndShape) {
  expect_refused({"routing.logits", "F32 or BF16 or F16", "F64"},
                 [](RouteCall& call) { call.routing.logits.dtype = DType::kF64; });
  expect_refused({"routing.logits", "[tokens, 8]", "F32[3, 7]"},
                 [](RouteCall& call) { call.routing.logits.shape[1] = 7; });
  expect_refused({"routing.logits", "[tokens, 8]"},
                 [](RouteCall& call) { call.routing.logits.rank = 1; });
  expect_refused({"routing.logits", "row stride"},
                 [](RouteCall& call) { call.routing.logits.strides[0] = 7; });
  expect_refused({"routing.logits", "stride 1"},
                 [](RouteCall& call) { call.routing.logits.strides[1] = 2; });
  expect_refused({"routing.logits", "null"},
                 [](RouteCall& call) { call.routing.logits.data = nullptr; });
  expect_refused({"routing.bias", "8 values"}, [](RouteCall& call) {
    call.config.method = RoutingMethod::kMiniMax2;
    call.routing.bias = call.bias.view();
    call.routing.bias.shape[0] = 7;
  });
  expect_refused({"routing.bias", "F32 or BF16", "F16"}, [](RouteCall& call) {
    call.config.method = RoutingMethod::kMiniMax2;
    call.routing.bias = call.bias.view();
    call.routing.bias.dtype = DType::kF16;
  });
  expect_refused({"routing.packed", "I32", "I64"}, [](RouteCall& call) {
    call.use_packed();
    call.routing.packed.dtype = DType::kI64;
  });
  expect_refused({"routing.ids", "[tokens, 2]"}, [](RouteCall& call) {
    call.use_ids();
    call.routing.ids.shape[1] = 3;
  });
  expect_refused({"routing.weights", "[3, 2]", "F32[2, 2]"}, [](RouteCall& call) {
    call.use_ids();
    call.routing.weights.shape[0] = 2;
  });
  expect_refused({"routing.ids", "dense"}, [](RouteCall& call) {
    call.use_ids();
    call.routing.ids.strides[0] = 3;
  });
}

TEST(RouteChecks, OutputsMustHaveTheirTypeAndShape) {
  expect_refused({"outputs.ids", "[3, 2]", "I32[2, 2]"},
                 [](RouteCall& call) { call.outputs.ids.shape[0] = 2; });
  expect_refused({"outputs.ids", "[3, 3]"},
                 [](RouteCall& call) { call.config.shared_experts = 1; });
  expect_refused({"outputs.ids", "I32", "I64"},
                 [](RouteCall& call) { call.outputs.ids.dtype = DType::kI64; });
  expect_refused({"outputs.ids", "[3, 2]"}, [](RouteCall& call) { call.outputs.ids = {}; });
  expect_refused({"outputs.weights", "F32", "BF16"},
                 [](RouteCall& call) { call.outputs.weights.dtype = DType::kBF16; });
  expect_refused({"outputs.weights", "device", "cuda:0"},
                 [](RouteCall& call) { call.outputs.weights.device.type = DeviceType::kCuda; });
  expect_refused({"outputs.replay", "I16", "I32"},
                 [](RouteCall& call) { call.outputs.replay.dtype = DType::kI32; });
  expect_refused({"outputs.replay", "at least 3 rows"},
                 [](RouteCall& call) { call.outputs.replay.shape[0] = 2; });
  expect_refused({"outputs.replay", "shared experts"}, [](RouteCall& call) {
    call.config.top_k = 1;
    call.config.shared_experts = 1;
  });
}

TEST(RouteChecks, OutputsMustNotOverlap) {
  expect_refused({"outputs.ids", "overlaps", "outputs.weights"},
                 [](RouteCall& call) { call.outputs.weights.data = call.outputs.ids.data; });
  expect_refused({"outputs.ids", "overlaps", "routing.ids"}, [](RouteCall& call) {
    call.use_ids();
    call.outputs.ids.data = call.routing.ids.data;
  });
}

TEST(RouteChecks, SlotsMustBeCountableInInt32) {
  expect_refused({"2^31 slots", "1073741824 tokens x 2"}, [](RouteCall& call) {
    call.use_packed();
    call.routing.packed.shape[0] = int64_t{1} << 30;
  });
}

TEST(RouteChecks, AnOtherDeviceHasNoImplementationHere) {
  if (build_has_cuda()) GTEST_SKIP();
  RouteCall call;
  for (TensorView* view :
       {&call.routing.logits, &call.outputs.ids, &call.outputs.weights, &call.outputs.replay}) {
    view->device.type = DeviceType::kCuda;
  }
  expect_error(ErrorKind::kUnsupported, {"cpu_baseline", "runs on the CPU only", "renormalize"},
               [&] { route(call.routing, call.config, call.outputs); });
}

TEST(RouteProblemText, TellsWhatIsRouted) {
  RouteProblem problem{.tokens = 5, .config = {.method = RoutingMethod::kDeepSeekV3}};
  problem.config.experts = 256;
  problem.config.top_k = 8;
  problem.config.n_group = 8;
  problem.config.topk_group = 4;
  EXPECT_EQ(to_string(problem),
            "F32 logits deepseek_v3, 5 tokens, 8 of 256 experts in 4 of 8 groups on cpu");
  problem.input = RoutingInput::kPacked;
  problem.config.n_group = 1;
  problem.config.shared_experts = 1;
  EXPECT_EQ(to_string(problem),
            "F32 packed precomputed, 5 tokens, 8 of 256 experts + 1 shared on cpu");
}

}  // namespace
}  // namespace narrowfloat::testing
