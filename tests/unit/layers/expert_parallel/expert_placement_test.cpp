// The placement of experts: what every placement keeps, what it gains, and its files.
#include "narrowfloat/expert_placement.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <numeric>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "support/allreduce_ranks.h"
#include "support/expect_error.h"
#include "support/random.h"
#include "support/temp_dir.h"
#include "unit/layers/expert_parallel/expert_case.h"

namespace narrowfloat::testing {
namespace {

std::vector<double> zipf(int32_t experts) {
  std::vector<double> loads;
  for (int32_t expert = 0; expert < experts; ++expert) loads.push_back(1e6 / (expert + 1));
  return loads;
}

double imbalance(const ExpertPlaces& places, const std::vector<double>& loads, int ranks) {
  return load_imbalance(rank_loads(places, loads, ranks));
}

TEST(PlaceExperts, EveryPlacementIsValid) {
  Random random(7);
  for (int trial = 0; trial < 400; ++trial) {
    const auto experts = static_cast<int32_t>(random.range(1, 40));
    const auto ranks = static_cast<int>(random.range(1, std::min(experts, 9)));
    const auto redundant = static_cast<int32_t>(random.range(0, experts * (ranks - 1)));
    std::vector<double> loads;
    for (int32_t expert = 0; expert < experts; ++expert) {
      loads.push_back(random.chance(20) ? 0 : std::exp(3 * random.normal()));
    }
    SCOPED_TRACE(fmt::format("{} experts, {} ranks, {} redundant", experts, ranks, redundant));
    const ExpertPlaces places = place_experts(loads, ranks, redundant);
    EXPECT_EQ(places.size(), static_cast<size_t>(experts + redundant));
    ASSERT_NO_THROW(check_places(places, experts, ranks));
    const std::vector<double> sums = rank_loads(places, loads, ranks);
    EXPECT_NEAR(std::accumulate(sums.begin(), sums.end(), 0.0),
                std::accumulate(loads.begin(), loads.end(), 0.0), 1e-6 * 1e6);
    EXPECT_EQ(places, place_experts(loads, ranks, redundant));
  }
}

TEST(PlaceExperts, FindsAnEvenPlacement) {
  // Each rank can have 10 in one way alone: 9 + 1, 8 + 2, 7 + 3, 6 + 4.
  const std::vector<double> loads{9, 8, 7, 6, 4, 3, 2, 1};
  EXPECT_EQ(imbalance(place_experts(loads, 4), loads, 4), 1);
  // One expert has half of all work; a copy on each of two ranks evens that out.
  const std::vector<double> skewed{6, 1, 1, 1, 1, 1, 1};
  EXPECT_EQ(imbalance(place_experts(skewed, 2, 1), skewed, 2), 1);
}

TEST(PlaceExperts, EvensOutSkewedLoads) {
  const std::vector<double> loads = zipf(256);
  ExpertPlaces in_order(256);
  std::iota(in_order.begin(), in_order.end(), 0);
  const double before = imbalance(in_order, loads, 8);
  const double placed = imbalance(place_experts(loads, 8), loads, 8);
  const double with_copies = imbalance(place_experts(loads, 8, 32), loads, 8);
  EXPECT_GT(before, 5);
  // The rank of the heaviest expert has 32 places as all others have, so at best the 31 lightest.
  const double total = std::accumulate(loads.begin(), loads.end(), 0.0);
  const double least = loads[0] + std::accumulate(loads.end() - 31, loads.end(), 0.0);
  EXPECT_GE(placed, 8 * least / total * (1 - 1e-12));
  EXPECT_LT(placed, 8 * least / total + 0.005);
  EXPECT_LT(with_copies, 1.001);
  EXPECT_EQ(load_imbalance(std::vector<double>(4, 0.0)), 1);
}

TEST(PlaceExperts, RefusesWhatHasNoMeaning) {
  const std::vector<double> loads{1, 2, 3};
  expect_error(kInvalid, {"ranks", "1 to the 3", "got 4"}, [&] { place_experts(loads, 4); });
  expect_error(kInvalid, {"ranks", "got 0"}, [&] { place_experts(loads, 0); });
  expect_error(kInvalid, {"redundant", "0 to 3", "got 4"}, [&] { place_experts(loads, 2, 4); });
  for (const double bad : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    const std::vector<double> with_bad{1, bad};
    expect_error(kInvalid, {"loads", "expert 1"}, [&] { place_experts(with_bad, 2); });
  }
  const auto check = [](const ExpertPlaces& places) { check_places(places, 3, 2); };
  expect_error(kInvalid, {"places", "got 2"}, [&] { check({0, 1}); });
  expect_error(kInvalid, {"places", "0 to 2", "got 3"}, [&] { check({0, 1, 2, 3}); });
  expect_error(kInvalid, {"rank 1", "expert 2 twice"}, [&] { check({0, 1, 2, 2}); });
  expect_error(kInvalid, {"expert 2 has none"}, [&] { check({0, 1, 0, 1}); });
}

TEST(PlaceOfExpert, SpreadsSourceRanksOverCopies) {
  const ExpertPlaces places{0, 1, 0, 2, 0, 3};  // Ranks of two places.
  EXPECT_EQ(place_of_expert(places, 4, 0), (std::vector<int32_t>{0, 1, 3, 5}));
  EXPECT_EQ(place_of_expert(places, 4, 1), (std::vector<int32_t>{2, 1, 3, 5}));
  EXPECT_EQ(place_of_expert(places, 4, 2), (std::vector<int32_t>{4, 1, 3, 5}));
  EXPECT_EQ(place_of_expert(places, 4, 3), (std::vector<int32_t>{0, 1, 3, 5}));
}

TEST(ExpertPlacement, AFileReadAndWrittenAgainIsTheSame) {
  const TempDir directory;
  const std::string path = directory / "places.json";
  const ExpertPlacement placement{
      .experts = 3, .ranks = 2, .layers = {{"0", {0, 1, 2, 0}}, {"model.\"1\"", {2, 0, 1, 2}}}};
  placement.save(path, false);
  const ExpertPlacement again = ExpertPlacement::load(path);
  EXPECT_EQ(again.experts, 3);
  EXPECT_EQ(again.ranks, 2);
  EXPECT_EQ(again.layers, placement.layers);
  EXPECT_ANY_THROW(placement.save(path, false));
}

TEST(ExpertPlacement, RefusesBadFiles) {
  const TempDir directory;
  const std::string path = directory / "bad.json";
  const auto refuses = [&](const std::string& text, std::initializer_list<std::string> words,
                           const auto& read) {
    std::ofstream(path) << text;
    expect_error(ErrorKind::kCorruptData, words, read);
  };
  const auto read_places = [&] { ExpertPlacement::load(path); };
  const std::string head = R"({"format":"narrowfloat expert placement","format_version":1,)";
  refuses("[]", {"bad.json"}, read_places);
  refuses("{}", {"format", "moe place"}, read_places);
  refuses(head + R"("experts":0,"ranks":1,"places":{"0":[0]}})", {"experts"}, read_places);
  refuses(head + R"("experts":2,"ranks":1,"places":{"0":[0,0]}})", {"layer '0'", "twice"},
          read_places);
  refuses(head + R"("experts":2,"ranks":1,"places":{"0":[0,4294967297]}})", {"0 to 1"},
          read_places);
  refuses(head + R"("experts":2,"ranks":1,"places":{"0":[0,0.5]}})", {"whole numbers", "0.5"},
          read_places);
  const auto read_loads = [&] { load_expert_loads(path); };
  refuses(R"({"loads":{}})", {"loads"}, read_loads);
  refuses(R"({"loads":{"0":[1,2],"1":[1]}})", {"layer '1'", "2 numbers", "got 1"}, read_loads);
  refuses(R"({"loads":{"0":[1,-2]}})", {"layer '0'", "-2"}, read_loads);
}

// --- Expert parallelism with places --------------------------------------------------------------

TEST(ExpertParallelPlaces, GiveTheBytesOfTheLayer) {
  uint64_t seed = 40;
  const ExpertPlaces permuted{5, 0, 3, 6, 1, 7, 2, 4};
  const ExpertPlaces with_copies = place_experts(zipf(8), 3, 5);
  for (const ExpertPlaces& places : {permuted, with_copies}) {
    for (const MoeMode mode : {MoeMode::kBf16, MoeMode::kNvfp4PerToken}) {
      for (const CombineOrder order : {CombineOrder::kRank, CombineOrder::kTopK}) {
        SCOPED_TRACE(fmt::format("{} places, {}, {}", places.size(), name(mode), name(order)));
        const ExpertCase c({.mode = mode,
                            .ranks = 3,
                            .tokens = {5, 0, 8},
                            .experts = 8,
                            .top_k = 3,
                            .ids = IdsPattern::kWithInvalid,
                            .order = order,
                            .places = places},
                           ++seed);
        auto group = ExpertParallel::create_local(3, c.config());
        EXPECT_EQ(group[0].shard(), expert_shard(static_cast<int32_t>(places.size()), 3, 0));
        run_as_threads(3, [&](int rank) {
          EXPECT_EQ(c.run(group[static_cast<size_t>(rank)]), c.expected(rank)) << "rank " << rank;
        });
      }
    }
  }
}

TEST(ExpertParallelPlaces, AreChecked) {
  ExpertParallelConfig config{.hidden = 128, .experts = 4, .top_k = 2, .max_tokens = 8};
  config.places = {0, 1, 2, 2};
  expect_error(kInvalid, {"places", "rank 1", "expert 2 twice"},
               [&] { ExpertParallel::create_local(2, config); });
  config.places = {0, 1, 2, 0};
  expect_error(kInvalid, {"places", "expert 3 has none"},
               [&] { ExpertParallel::create_local(2, config); });
}

}  // namespace
}  // namespace narrowfloat::testing
