// Many runs of a layer on a GPU, in all ways at once (moe spec 13.3): graphs with new contents,
// graphs that share memory, a hundred repetitions in other memory, a thousand runs on two streams,
// workspaces to the byte.
#include <algorithm>

#include <gtest/gtest.h>

#include "cuda/gpu_test.h"
#include "support/expect_error.h"
#include "support/gpu_moe.h"

namespace narrowfloat::testing {
namespace {

constexpr MoeShape kEnduranceShape{
    .tokens = 37, .hidden = 256, .inter = 384, .experts = 16, .top_k = 4, .shared_experts = 1};
constexpr size_t kEnduranceRowBytes = kEnduranceShape.hidden * 2;

class MoeEndurance : public GpuTestWith<MoeMode> {
 protected:
  void SetUp() override {
    GpuTestWith<MoeMode>::SetUp();
    case_ = std::make_unique<MoeCase>(GetParam(), kEnduranceShape, Activation::swiglu(), 91);
  }
  MoeCase& layer_case() { return *case_; }
  // Other tokens; `step` of 9 parts of them go to the same experts.
  void change(int step) {
    std::vector<uint16_t>& x = layer_case().x();
    std::rotate(x.begin(), x.begin() + 5 * kEnduranceShape.hidden + 3, x.end());
    for (int64_t token = 0; token < kEnduranceShape.tokens; ++token) {
      for (int64_t expert = 0; expert < kEnduranceShape.experts; ++expert) {
        // Balanced: four experts in rotation.
        const bool is_next = (expert + 12 * token) % kEnduranceShape.experts < 4;
        const bool is_same = expert % 5 == 2;
        const bool is_skewed = token * 9 < kEnduranceShape.tokens * step;
        float& logit =
            layer_case().logits()[static_cast<size_t>(token * kEnduranceShape.experts + expert)];
        logit = (is_skewed ? is_same : is_next) ? 3.0F : -0.125F * static_cast<float>(expert);
      }
    }
  }

 private:
  std::unique_ptr<MoeCase> case_;
};
INSTANTIATE_TEST_SUITE_P(Moe, MoeEndurance, ::testing::ValuesIn(every_gpu_moe_mode()),
                         mode_test_name);

TEST_P(MoeEndurance, AGraphTakesTenRoutingsFromBalancedToAllToOne) {
  const MoeLayer layer = prepare_on_gpu(layer_case());
  const GpuMoeRun run(layer, layer_case());
  const CudaStream stream;
  const CapturedGraph graph(stream, [&] { run.queue(stream.get(true)); });
  EXPECT_EQ(graph.num_other_nodes(), 0);
  MoeResult previous;
  for (int step = 0; step < 10; ++step) {
    change(step);
    const MoeResult expected = run_on_gpu(layer, layer_case());
    EXPECT_FALSE(expected == previous);
    run.poison(static_cast<uint8_t>(29 * step));
    run.send(layer_case().inputs(), layer_case().routing());
    graph.replay();
    ASSERT_TRUE(run.take() == expected) << "step " << step;
    previous = expected;
  }
}

// The graphs run 37 tokens and their first 9, with the same inputs, outputs and workspace.
TEST_P(MoeEndurance, GraphsOfOneLayerAlternate) {
  constexpr int64_t kFew = 9;
  const MoeLayer layer = prepare_on_gpu(layer_case());
  const MoeResult all = run_on_gpu(layer, layer_case());
  const GpuMoeRun run(layer, layer_case());
  const CudaStream stream;
  run.queue_first_tokens(kFew, stream.get());
  stream.synchronize();
  const std::vector<float> few = run.output_of(0, kFew);
  const CapturedGraph many_tokens(stream, [&] { run.queue(stream.get()); });
  const CapturedGraph few_tokens(stream, [&] { run.queue_first_tokens(kFew, stream.get(true)); });
  for (int round = 0; round < 10; ++round) {
    run.poison(0xFF);
    few_tokens.replay();
    ASSERT_EQ(run.output_of(0, kFew), few) << "round " << round;
    many_tokens.replay();
    ASSERT_TRUE(run.take() == all) << "round " << round;
  }
}

TEST_P(MoeEndurance, AHundredRunsGiveTheSameBitsInOtherMemory) {
  const MoeLayer layer = prepare_on_gpu(layer_case());
  const MoeResult expected = run_on_gpu(layer, layer_case());
  GpuMoeRun run(layer, layer_case());
  const CudaStream stream;
  for (int repetition = 0; repetition < 100; ++repetition) {
    if (repetition % 10 == 9) run.move_workspace(256 * (repetition / 10 + 1));
    run.poison(static_cast<uint8_t>(37 * repetition));
    run.queue(stream.get(repetition % 2 == 0));
    stream.synchronize();
    ASSERT_TRUE(run.take() == expected) << "repetition " << repetition;
  }
}

// Beside the same layer on other tokens, and beside another layer that keeps the GPU busy.
TEST_P(MoeEndurance, AThousandRunsOnTwoStreamsGiveTheSerialBits) {
  MoeCase second(GetParam(),
                 {.tokens = 300, .hidden = 256, .inter = 384, .experts = 16, .top_k = 4},
                 Activation::plain(ActivationKind::kRelu2), 92);
  const MoeLayer layer = prepare_on_gpu(layer_case());
  const MoeLayer other_layer = prepare_on_gpu(second);
  const MoeResult expected = run_on_gpu(layer, layer_case());
  const MoeResult other_expected = run_on_gpu(other_layer, second);
  const GpuMoeRun run(layer, layer_case());
  const GpuMoeRun same(layer, layer_case());
  const GpuMoeRun other(other_layer, second);
  const CudaStream stream;
  const CudaStream beside;
  for (int round = 0; round < 5; ++round) {
    for (const GpuMoeRun* each : {&run, &same, &other}) each->poison(0xFF);
    for (int i = 0; i < 100; ++i) {
      run.queue(stream.get(i % 2 == 0));
      (i < 50 ? same : other).queue(beside.get(i % 3 == 0));
    }
    stream.synchronize();
    beside.synchronize();
    ASSERT_TRUE(run.take() == expected) << "round " << round;
    ASSERT_TRUE(same.take() == expected) << "round " << round;
    ASSERT_TRUE(other.take() == other_expected) << "round " << round;
  }
}

TEST_P(MoeEndurance, AByteLessOfWorkspaceIsRefusedAndWritesNothing) {
  const MoeLayer layer = prepare_on_gpu(layer_case());
  const MoeResult expected = run_on_gpu(layer, layer_case());
  const GpuMoeRun run(layer, layer_case());
  run.poison(0xFF);
  const CudaStream stream;
  const int64_t bytes = layer.required_workspace(kEnduranceShape.tokens);
  expect_error(ErrorKind::kInvalidArgument,
               {"workspace", "37 tokens", std::to_string(bytes), std::to_string(bytes - 1)},
               [&] { run.queue_in_workspace(bytes - 1, stream.get()); });
  stream.synchronize();
  EXPECT_EQ(run.take().out,
            std::vector<uint8_t>(kEnduranceShape.tokens * kEnduranceRowBytes, 0xFF));
  run.queue_in_workspace(bytes, stream.get());
  stream.synchronize();
  EXPECT_TRUE(run.take() == expected);
}

}  // namespace
}  // namespace narrowfloat::testing
