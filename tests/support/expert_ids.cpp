// See expert_ids.h.
#include "support/expert_ids.h"

#include <algorithm>
#include <array>
#include <limits>

namespace narrowfloat::testing {
namespace {

// Any expert outside the shard; -1 if there is none.
int32_t foreign(const IdShape& shape, Random& random) {
  if (shape.experts == shape.local) return -1;
  const auto id = static_cast<int32_t>(random.range(0, shape.experts - shape.local - 1));
  return id < shape.offset ? id : id + shape.local;
}

int32_t uniform(const IdShape& shape, Random& random) {
  return static_cast<int32_t>(random.range(0, shape.experts - 1));
}

int32_t local(const IdShape& shape, Random& random) {
  return shape.offset + static_cast<int32_t>(random.range(0, shape.local - 1));
}

// Expert i in proportion to about 1 / i, roughly: the quotient of two uniform numbers.
int32_t zipf(const IdShape& shape, Random& random) {
  const int64_t limit = random.range(1, shape.experts);
  return static_cast<int32_t>(random.range(0, limit - 1));
}

int32_t any_integer(const IdShape& shape, Random& random) {
  const int32_t bits = static_cast<int32_t>(random.bits32());
  return random.pick({bits, bits, std::numeric_limits<int32_t>::min(),
                      std::numeric_limits<int32_t>::max(), -1, shape.offset - 1, shape.offset,
                      shape.offset + shape.local - 1, shape.offset + shape.local});
}

void shuffle(std::vector<int32_t>& ids, Random& random) {
  for (size_t i = ids.size(); i > 1; --i) {
    std::swap(ids[i - 1], ids[static_cast<size_t>(random.range(0, static_cast<int64_t>(i) - 1))]);
  }
}

// ids[i] is the expert that the i-th slot would have in sorted order; then shuffles.
std::vector<int32_t> counted(IdSpread spread, const IdShape& shape, Random& random) {
  std::vector<int32_t> ids;
  const auto wanted = static_cast<size_t>(shape.tokens * shape.slots);
  for (int32_t e = 0; e < shape.local && ids.size() < wanted; ++e) {
    const int32_t count = spread == IdSpread::kOneEach ? 1 : shape.tile - 1 + e % 3;
    ids.insert(ids.end(), std::min(static_cast<size_t>(count), wanted - ids.size()),
               shape.offset + e);
  }
  ids.resize(wanted, -1);
  shuffle(ids, random);
  return ids;
}

std::vector<int32_t> repeated(IdSpread spread, const IdShape& shape, Random& random) {
  std::vector<int32_t> of_slot;
  for (int64_t s = 0; s < shape.slots; ++s) of_slot.push_back(uniform(shape, random));
  if (spread == IdSpread::kOneExpert) {
    of_slot.assign(of_slot.size(), local(shape, random));
  }
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < shape.tokens; ++t) {
    if (spread == IdSpread::kDuplicates) of_slot.assign(of_slot.size(), uniform(shape, random));
    ids.insert(ids.end(), of_slot.begin(), of_slot.end());
  }
  return ids;
}

int32_t one_id(IdSpread spread, const IdShape& shape, Random& random) {
  switch (spread) {
    case IdSpread::kNoneLocal:
      return foreign(shape, random);
    case IdSpread::kSomeLocal:
      return random.chance(50) ? foreign(shape, random) : local(shape, random);
    case IdSpread::kZipf:
      return zipf(shape, random);
    case IdSpread::kAnyInteger:
      return any_integer(shape, random);
    default:
      return uniform(shape, random);
  }
}

}  // namespace

std::string_view name(IdSpread spread) {
  static constexpr std::array<std::string_view, kNumIdSpreads> kNames{
      "uniform", "one_expert", "same_experts", "none_local",  "some_local",  "one_each",
      "zipf",    "duplicates", "tile_counts",  "any_integer", "last_experts"};
  return kNames[static_cast<size_t>(spread)];
}

std::vector<int32_t> expert_ids(IdSpread spread, const IdShape& shape, Random& random) {
  switch (spread) {
    case IdSpread::kOneEach:
    case IdSpread::kTileCounts:
      return counted(spread, shape, random);
    case IdSpread::kOneExpert:
    case IdSpread::kSameExperts:
    case IdSpread::kDuplicates:
      return repeated(spread, shape, random);
    default:
      break;
  }
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < shape.tokens * shape.slots; ++i) {
    const bool is_last = (i + 1) % shape.slots == 0;
    ids.push_back(spread == IdSpread::kLastExperts && is_last ? shape.offset + shape.local - 1
                                                              : one_id(spread, shape, random));
  }
  return ids;
}

}  // namespace narrowfloat::testing
