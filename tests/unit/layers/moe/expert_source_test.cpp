// Layers whose weights come an expert at a time: the bits of whole weights, with originals that are
// gone as soon as the next expert is asked for.
#include <algorithm>
#include <cstring>

#include <gtest/gtest.h>

#include "support/environment.h"
#include "support/expect_error.h"
#include "support/moe_case.h"

namespace narrowfloat::testing {
namespace {

constexpr MoeShape kShape{.tokens = 7, .hidden = 256, .inter = 128, .experts = 6, .top_k = 2};

class ExpertSources : public ::testing::TestWithParam<MoeMode> {};
INSTANTIATE_TEST_SUITE_P(Moe, ExpertSources, ::testing::ValuesIn(every_moe_mode()), mode_test_name);

// One expert of a case's weights at a time, in the same memory.
class OneExpertAtATime {
 public:
  OneExpertAtATime(const MoeCase& layer_case, bool is_first)
      : layer_case_(layer_case), is_first_(is_first) {}

  WeightView operator()(int64_t expert) {
    asked_.push_back(expert);
    const MoeWeights own = layer_case_.shard(static_cast<int32_t>(expert), 1);
    WeightView view = is_first_ ? own.w1 : own.w2;
    values_.assign(static_cast<size_t>(view.values.num_elements() * bits(view.values.dtype) / 8),
                   0);
    std::memcpy(values_.data(), view.values.data, values_.size());
    view.values.data = values_.data();
    if (view.scales.data == nullptr) return view;
    scales_.assign(static_cast<size_t>(view.scales.capacity * bytes(view.scales.type)), 0);
    std::memcpy(scales_.data(), view.scales.data, scales_.size());
    view.scales.data = scales_.data();
    return view;
  }
  [[nodiscard]] const std::vector<int64_t>& asked() const { return asked_; }
  void forget() {
    std::fill(values_.begin(), values_.end(), uint8_t{0xFF});
    std::fill(scales_.begin(), scales_.end(), uint8_t{0xFF});
  }

 private:
  const MoeCase& layer_case_;
  bool is_first_;
  std::vector<uint8_t> values_, scales_;
  std::vector<int64_t> asked_;
};

TEST_P(ExpertSources, GiveTheBitsOfWholeWeights) {
  for (const char* implementation : {"cpu_baseline", "cpu_reference"}) {
    SCOPED_TRACE(implementation);
    const ForcedImplementation forced("grouped_gemm", implementation);
    MoeCase layer_case(GetParam(), kShape, Activation::swiglu(), 31);
    const MoeResult expected = layer_case.run();
    OneExpertAtATime first(layer_case, true);
    OneExpertAtATime second(layer_case, false);
    MoeWeights weights = layer_case.weights();
    weights.w1 = weights.w2 = {};
    weights.w1_source = [&](int64_t expert) { return first(expert); };
    weights.w2_source = [&](int64_t expert) { return second(expert); };
    const MoeLayer layer = MoeLayer::prepare(weights, layer_case.config());
    first.forget();
    second.forget();
    EXPECT_EQ(layer_case.run(layer), expected);
    const std::vector<int64_t> all{0, 1, 2, 3, 4, 5};
    EXPECT_EQ(first.asked(), all);
    EXPECT_EQ(second.asked(), all);
  }
}

TEST(ExpertSourceChecks, RefuseWhatDoesNotFit) {
  const MoeCase layer_case(MoeMode::kFp8Block, kShape, Activation::swiglu(), 32);
  const MoeConfig config = MoeCase(MoeMode::kFp8Block, kShape, Activation::swiglu(), 32).config();
  MoeWeights weights = layer_case.shard(0, 6);
  const auto prepare = [&] { (void)MoeLayer::prepare(weights, config); };
  weights.w1_source = [&](int64_t expert) {
    return layer_case.shard(static_cast<int32_t>(expert), 1).w1;
  };
  expect_error(ErrorKind::kInvalidArgument, {"weights.w1", "got both"}, prepare);
  weights.w1 = {};
  EXPECT_NO_THROW(prepare());
  // Two experts at once, and those of the other weight from the fourth on.
  weights.w1_source = [&](int64_t) { return layer_case.shard(0, 2).w1; };
  expect_error(ErrorKind::kInvalidArgument, {"weights.w1_source", "[1, 256, 256]"}, prepare);
  weights.w1_source = [&](int64_t expert) {
    const MoeWeights own = layer_case.shard(static_cast<int32_t>(expert), 1);
    return expert < 3 ? own.w1 : own.w2;
  };
  expect_error(ErrorKind::kInvalidArgument, {"weights.w1_source"}, prepare);
}

TEST(ExpertSourceChecks, GroupedWeightsRefuseEmptySourcesAndOtherShapes) {
  const MoeCase layer_case(MoeMode::kBf16, kShape, Activation::swiglu(), 33);
  expect_error(ErrorKind::kInvalidArgument, {"source", "empty"},
               [&] { (void)GroupedWeights::prepare(ExpertSource(), 3, MoeMode::kBf16); });
  const ExpertSource mixed = [&](int64_t expert) {
    const MoeWeights own = layer_case.shard(static_cast<int32_t>(expert), 1);
    return expert < 1 ? own.w1 : own.w2;
  };
  expect_error(ErrorKind::kInvalidArgument, {"source", "256x256", "256x128", "expert 1"},
               [&] { (void)GroupedWeights::prepare(mixed, 2, MoeMode::kBf16); });
  expect_error(ErrorKind::kInvalidArgument, {"experts", "0"},
               [&] { (void)GroupedWeights::prepare(mixed, 0, MoeMode::kBf16); });
}

}  // namespace
}  // namespace narrowfloat::testing
