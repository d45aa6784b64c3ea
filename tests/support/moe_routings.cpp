// See moe_routings.h.
#include "support/moe_routings.h"

#include <cmath>

#include "support/random.h"

namespace narrowfloat::testing {
namespace {

constexpr int32_t kRoutedExperts = 16;

void add_slot(GivenRouting& routing, int32_t id, Random& random) {
  routing.ids.push_back(id);
  routing.weights.push_back(random.normal());
}

// `count` tokens of each expert one after another, which has the first slot; the other slot is
// another expert's where it has none in `counts`, so that the counts hold.
GivenRouting with_counts(const std::vector<int32_t>& counts, Random& random) {
  GivenRouting routing{.name = "counts around tiles", .top_k = 2, .ids = {}, .weights = {}};
  for (size_t expert = 0; expert < counts.size(); ++expert) {
    for (int32_t i = 0; i < counts[expert]; ++i) {
      const auto other = static_cast<int64_t>(counts.size());
      add_slot(routing, static_cast<int32_t>(expert), random);
      add_slot(routing, static_cast<int32_t>(random.range(other, kRoutedExperts - 1)), random);
    }
  }
  return routing;
}

GivenRouting zipf(int64_t tokens, Random& random) {
  GivenRouting routing{.name = "zipf", .top_k = 2, .ids = {}, .weights = {}};
  for (int64_t slot = 0; slot < 2 * tokens; ++slot) {
    // Inverse of the distribution function of 1 / rank.
    const auto uniform = static_cast<double>(random.range(0, 999)) / 1000.0;
    const auto rank = static_cast<int32_t>(std::pow(kRoutedExperts, uniform));
    add_slot(routing, std::min(rank, kRoutedExperts) - 1, random);
  }
  return routing;
}

// A slot in `percent` of all is empty.
GivenRouting uniform(std::string name, int64_t tokens, int percent, Random& random) {
  GivenRouting routing{.name = std::move(name), .top_k = 2, .ids = {}, .weights = {}};
  for (int64_t slot = 0; slot < 2 * tokens; ++slot) {
    const auto id = static_cast<int32_t>(random.range(0, kRoutedExperts - 1));
    add_slot(routing, random.chance(percent) ? -1 : id, random);
  }
  return routing;
}

}  // namespace

Routing GivenRouting::view() const {
  Routing routing;
  routing.ids = TensorView::contiguous(ids.data(), DType::kI32, {tokens(), top_k});
  routing.weights = TensorView::contiguous(weights.data(), DType::kF32, {tokens(), top_k});
  return routing;
}

GivenRouting same_experts(std::string name, int64_t tokens, const std::vector<int32_t>& experts) {
  GivenRouting routing{.name = std::move(name),
                       .top_k = static_cast<int64_t>(experts.size()),
                       .ids = {},
                       .weights = {}};
  for (int64_t token = 0; token < tokens; ++token) {
    for (size_t slot = 0; slot < experts.size(); ++slot) {
      routing.ids.push_back(experts[slot]);
      routing.weights.push_back(0.5F + 0.25F * static_cast<float>(slot));
    }
  }
  return routing;
}

std::vector<GivenRouting> skewed_routings() {
  Random random(71);
  std::vector<GivenRouting> routings;
  routings.push_back(uniform("uniform", 80, 0, random));
  routings.push_back(same_experts("one expert, twice", 37, {5, 5}));
  routings.push_back(same_experts("the same experts", 37, {15, 0}));
  GivenRouting each{.name = "one token an expert", .top_k = 2, .ids = {}, .weights = {}};
  for (int32_t id = 0; id < kRoutedExperts; ++id) add_slot(each, kRoutedExperts - 1 - id, random);
  routings.push_back(each);
  routings.push_back(with_counts({7, 8, 9, 0, 15, 16, 17}, random));
  routings.push_back(zipf(80, random));
  routings.push_back(uniform("some empty", 40, 50, random));
  routings.push_back(same_experts("all empty", 8, {-1, -1}));
  return routings;
}

}  // namespace narrowfloat::testing
