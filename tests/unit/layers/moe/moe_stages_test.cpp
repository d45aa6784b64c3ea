// fp32 sums of the CPU against fp64, stage by stage, at sizes of real layers' rows: what the same
// comparison of a GPU is worth, whose bounds are no tighter.
#include "support/moe_stages.h"

#include <gtest/gtest.h>

namespace narrowfloat::testing {
namespace {

class MoeStages : public ::testing::TestWithParam<MoeMode> {};
INSTANTIATE_TEST_SUITE_P(Moe, MoeStages, ::testing::ValuesIn(every_moe_mode()), mode_test_name);

TEST_P(MoeStages, AreWithinTheBoundsOfTheSpecification) {
  const MoeShape shape{.tokens = 8, .hidden = 384, .inter = 640, .experts = 3, .top_k = 2};
  MoeCase layer_case(GetParam(), shape, Activation::swiglu(), 51);
  layer_case.add_biases();
  HostPlace place;
  expect_stages_close(layer_case, place, true);
}

}  // namespace
}  // namespace narrowfloat::testing
