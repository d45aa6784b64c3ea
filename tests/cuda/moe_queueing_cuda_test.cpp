// However runs of a layer are queued, they give the bits of a run alone (moe spec 1.5, 13.3):
// repeated, over any previous memory, with programmatic launch, from graphs, beside other streams
// and layers.
#include <algorithm>
#include <cstring>
#include <memory>

#include "base/int_math.h"
#include "cuda/gpu_test.h"
#include "support/expect_error.h"
#include "support/gpu_moe.h"
#include "tensor/row_format.h"

namespace narrowfloat::testing {
namespace {

constexpr MoeShape kQueueingShape{
    .tokens = 37, .hidden = 256, .inter = 384, .experts = 16, .top_k = 4, .shared_experts = 1};

class MoeQueueing : public GpuTestWith<MoeMode> {
 protected:
  static std::unique_ptr<MoeCase> make_case(uint64_t seed) {
    auto result = std::make_unique<MoeCase>(GetParam(), kQueueingShape,
                                            Activation::swiglu_oai(1.702F, 1.0F, 7.0F), seed);
    result->add_biases();
    return result;
  }
};
INSTANTIATE_TEST_SUITE_P(Moe, MoeQueueing, ::testing::ValuesIn(every_gpu_moe_mode()),
                         mode_test_name);

TEST_P(MoeQueueing, EveryRunGivesTheSameBits) {
  const auto layer_case = make_case(31);
  const MoeLayer layer = prepare_on_gpu(*layer_case);
  const MoeResult expected = run_on_gpu(layer, *layer_case, {.poison = 0x00});
  for (int repetition = 0; repetition < 20; ++repetition) {
    const auto poison = static_cast<uint8_t>(37 * repetition + 255);
    const GpuMoeStyle style{.poison = poison, .programmatic_launch = repetition % 2 == 1};
    ASSERT_EQ(run_on_gpu(layer, *layer_case, style), expected) << repetition;
  }
}

// Other tokens, and a routing from balanced to all on the same experts.
void change(MoeCase& layer_case) {
  std::rotate(layer_case.x().begin(), layer_case.x().begin() + 640, layer_case.x().end());
  const auto experts = static_cast<size_t>(layer_case.shape().experts);
  for (size_t i = 0; i < layer_case.logits().size(); ++i) {
    layer_case.logits()[i] = i % experts < 4 ? 3.0F : -1.0F;
  }
}

TEST_P(MoeQueueing, GraphsReplayTheRun) {
  for (const bool programmatic_launch : {false, true}) {
    const auto layer_case = make_case(32);
    const MoeLayer layer = prepare_on_gpu(*layer_case);
    const MoeResult expected = run_on_gpu(layer, *layer_case);
    const GpuMoeRun run(layer, *layer_case);
    const CudaStream stream;
    const CapturedGraph graph(stream, [&] { run.queue(stream.get(programmatic_launch)); });
    run.poison(0xFF);
    graph.replay(3);
    EXPECT_EQ(run.take(), expected);
    change(*layer_case);
    const MoeResult changed = run_on_gpu(layer, *layer_case);
    run.send(layer_case->inputs(), layer_case->routing());
    graph.replay(10);
    EXPECT_EQ(run.take(), changed);
    EXPECT_NE(changed, expected);
  }
}

TEST_P(MoeQueueing, StreamsWithTheirOwnWorkspaceDoNotDisturbEachOther) {
  const auto first = make_case(33);
  const auto second = make_case(34);
  const MoeLayer layer = prepare_on_gpu(*first);
  const MoeResult expected_first = run_on_gpu(layer, *first);
  const MoeResult expected_second = run_on_gpu(layer, *second);
  const GpuMoeRun run_first(layer, *first);
  const GpuMoeRun run_second(layer, *second);
  run_first.poison(0xFF);
  run_second.poison(0xFF);
  const CudaStream stream_first;
  const CudaStream stream_second;
  for (int repetition = 0; repetition < 50; ++repetition) {
    run_first.queue(stream_first.get(repetition % 2 == 0));
    run_second.queue(stream_second.get(repetition % 3 == 0));
  }
  stream_first.synchronize();
  stream_second.synchronize();
  EXPECT_EQ(run_first.take(), expected_first);
  EXPECT_EQ(run_second.take(), expected_second);
}

TEST_P(MoeQueueing, LayersAlternateOnAStream) {
  const auto first = make_case(35);
  MoeCase second(MoeMode::kBf16, {.tokens = 5, .hidden = 128, .inter = 144, .experts = 3},
                 Activation::plain(ActivationKind::kGeluTanh), 36);
  const MoeLayer layer_first = prepare_on_gpu(*first);
  const MoeLayer layer_second = prepare_on_gpu(second);
  const MoeResult expected_first = run_on_gpu(layer_first, *first);
  const MoeResult expected_second = run_on_gpu(layer_second, second);
  const GpuMoeRun run_first(layer_first, *first);
  const GpuMoeRun run_second(layer_second, second);
  const CudaStream stream;
  for (int repetition = 0; repetition < 20; ++repetition) {
    run_first.queue(stream.get(true));
    run_second.queue(stream.get(true));
  }
  stream.synchronize();
  EXPECT_EQ(run_first.take(), expected_first);
  EXPECT_EQ(run_second.take(), expected_second);
}

TEST_P(MoeQueueing, NoTokensCanBeCaptured) {
  MoeCase layer_case(GetParam(), {.tokens = 0, .hidden = 128, .inter = 128}, Activation::swiglu(),
                     37);
  const MoeLayer layer = prepare_on_gpu(layer_case);
  const GpuMoeRun run(layer, layer_case);
  const CudaStream stream;
  const CapturedGraph graph(stream, [&] { run.queue(stream.get()); });
  graph.replay(2);
  EXPECT_TRUE(run.take().out.empty());
}

// The launches that only prepare the second GEMM's rows: a kernel that sees whole MXFP8 rows
// dequantizes them, and the scale of a whole row needs a pass over it.
int64_t launches_between(MoeMode mode) {
  const RowFormat rows = moe_mode_info(mode).intermediate;
  return rows == RowFormat::kMxfp8 || has_row_scale(rows) ? 1 : 0;
}

// One launch routes, permutes, quantizes and dequantizes the input; another is a GEMM with the
// activation and the dequantization of its rows.
TEST_P(MoeQueueing, FewTokensTakeFewLaunches) {
  if (!gpu_has_own_code()) GTEST_SKIP() << "portable code has an operation a launch";
  for (const int64_t tokens : {1, 8, 64}) {
    MoeShape shape = kQueueingShape;
    shape.tokens = tokens;
    MoeCase layer_case(GetParam(), shape, Activation::swiglu(), 39);
    const MoeLayer layer = prepare_on_gpu(layer_case);
    const GpuMoeRun run(layer, layer_case);
    const CudaStream stream;
    const CapturedGraph graph(stream, [&] { run.queue(stream.get(true)); });
    EXPECT_EQ(graph.num_nodes(), 4 + launches_between(GetParam())) << tokens;
    EXPECT_EQ(graph.num_other_nodes(), 0);
  }
}

// How many output tiles the CTAs of each GEMM took from its counter in the last run.
std::vector<uint32_t> tiles_taken(const GpuMoeRun& run, const MoeLayer& layer, int64_t tokens) {
  constexpr int64_t kSlots = kQueueingShape.top_k + kQueueingShape.shared_experts;
  const PermutationLayout layout =
      permutation_layout(tokens, kSlots, kQueueingShape.experts + kQueueingShape.shared_experts,
                         layer.token_tile(tokens));
  // The counters follow ids, weights and the permutation (docs/moe.md, 14.2).
  const int64_t offset =
      2 * round_up(tokens * kSlots * 4, int64_t{256}) + round_up(layout.bytes, int64_t{256});
  std::vector<uint32_t> taken(2);
  std::memcpy(taken.data(), run.workspace().data() + offset, taken.size() * sizeof(uint32_t));
  return taken;
}

// The three sizes run the kernels that permute few, more and many tokens. The schedule is static
// with two weight encodings.
TEST_P(MoeQueueing, EveryRunClearsItsTileCounters) {
  if (!gpu_has_own_code()) GTEST_SKIP() << "portable code counts no tiles";
  for (const int64_t tokens : {37, 300, 2000}) {
    MoeShape shape = kQueueingShape;
    shape.tokens = tokens;
    MoeCase layer_case(GetParam(), shape, Activation::swiglu(), 40);
    const MoeLayer layer = prepare_on_gpu(layer_case);
    const GpuMoeRun run(layer, layer_case);
    const CudaStream stream;
    std::vector<uint32_t> first;
    for (int repetition = 0; repetition < 3; ++repetition) {
      if (repetition < 2) run.poison(repetition == 0 ? 0xFF : 0x5A);
      run.queue(stream.get(repetition > 0));
      stream.synchronize();
      const std::vector<uint32_t> taken = tiles_taken(run, layer, tokens);
      if (repetition == 0) first = taken;
      EXPECT_EQ(taken, first) << tokens << " tokens, run " << repetition;
    }
    const bool may_have_two_encodings =
        GetParam() == MoeMode::kMxfp4Fp8 || GetParam() == MoeMode::kNvfp4Fp8Rounded ||
        GetParam() == MoeMode::kMxfp4Fp8Token || GetParam() == MoeMode::kNvfp4Fp8Token;
    if (may_have_two_encodings) continue;
    EXPECT_GT(std::min(first[0], first[1]), 0U) << tokens;
    EXPECT_LT(std::max(first[0], first[1]), 1'000'000U) << tokens;
  }
}

TEST_P(MoeQueueing, AllocatesNothing) {
  const auto layer_case = make_case(38);
  const MoeLayer layer = prepare_on_gpu(*layer_case);
  const GpuMoeRun run(layer, *layer_case);
  const CudaStream stream;
  run.queue(stream.get());
  stream.synchronize();
  const int64_t free = free_device_memory();
  for (int repetition = 0; repetition < 10; ++repetition) run.queue(stream.get());
  stream.synchronize();
  EXPECT_EQ(free_device_memory(), free);
}

}  // namespace
}  // namespace narrowfloat::testing
