// Concurrent runs of one prepared layer, each with a workspace of its own. Also run in a build with
// ThreadSanitizer (docs/testing.md).
#include <thread>

#include <gtest/gtest.h>

#include "support/environment.h"
#include "support/moe_case.h"

namespace narrowfloat::testing {
namespace {

void run_concurrently(MoeMode mode, int num_callers, int repetitions) {
  const MoeShape shape{.tokens = 9, .hidden = 128, .inter = 128, .experts = 6, .top_k = 2};
  const MoeCase layer_case(mode, shape, Activation::swiglu(), 1);
  const MoeLayer layer = layer_case.prepare();
  const MoeResult expected = layer_case.run(layer);
  std::vector<std::thread> callers;
  std::vector<int> differing(static_cast<size_t>(num_callers));
  for (int caller = 0; caller < num_callers; ++caller) {
    callers.emplace_back([&, caller] {
      for (int i = 0; i < repetitions; ++i) {
        if (layer_case.run(layer) != expected) ++differing[static_cast<size_t>(caller)];
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(differing, std::vector<int>(static_cast<size_t>(num_callers), 0));
}

class MoeThreads : public ::testing::TestWithParam<MoeMode> {};

INSTANTIATE_TEST_SUITE_P(Moe, MoeThreads,
                         ::testing::Values(MoeMode::kBf16, MoeMode::kFp8Block, MoeMode::kMxfp4Mxfp8,
                                           MoeMode::kNvfp4PerToken),
                         mode_test_name);

TEST_P(MoeThreads, ConcurrentRunsOnOneLayerGiveTheSerialResult) {
  run_concurrently(GetParam(), 4, 10);
}

// Each caller computes alone, so that every access is one that ThreadSanitizer sees ordered or not.
TEST_P(MoeThreads, ConcurrentRunsWithoutThePoolGiveTheSerialResult) {
  const ThreadLimit limit(1);
  run_concurrently(GetParam(), 3, 5);
}

TEST(MoeThreads, ResultsDoNotDependOnTheNumberOfThreads) {
  const MoeShape shape{.tokens = 40, .hidden = 256, .inter = 128, .experts = 6, .top_k = 2};
  const MoeCase layer_case(MoeMode::kNvfp4, shape, Activation::swiglu(), 2);
  const MoeResult all = layer_case.run();
  const ThreadLimit limit(1);
  EXPECT_EQ(layer_case.run(), all);
}

TEST(MoeThreads, LayersOfDifferentModesDoNotDisturbEachOther) {
  const MoeShape shape{.tokens = 9, .hidden = 128, .inter = 128, .experts = 6, .top_k = 2};
  const MoeCase first(MoeMode::kFp8Tensor, shape, Activation::swiglu(), 3);
  const MoeCase second(MoeMode::kNvfp4PerToken, shape, Activation::situ(4, 25), 4);
  const MoeLayer first_layer = first.prepare();
  const MoeLayer second_layer = second.prepare();
  const MoeResult first_result = first.run(first_layer);
  const MoeResult second_result = second.run(second_layer);
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(first.run(first_layer), first_result);
    EXPECT_EQ(second.run(second_layer), second_result);
  }
}

}  // namespace
}  // namespace narrowfloat::testing
