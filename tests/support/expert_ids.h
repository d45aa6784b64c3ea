// Expert ids of tokens, in the distributions that sorting by expert gets wrong (moe spec 13.2).
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "support/random.h"

namespace narrowfloat::testing {

enum class IdSpread : int {
  kUniform = 0,      // Over all experts.
  kOneExpert = 1,    // Every slot on one local expert.
  kSameExperts = 2,  // Every token on the same experts.
  kNoneLocal = 3,
  kSomeLocal = 4,  // Half of the slots.
  kOneEach = 5,    // At most one slot on each expert, in shuffled order; -1 once all are taken.
  kZipf = 6,
  kDuplicates = 7,   // One expert for all slots of a token.
  kTileCounts = 8,   // Counts of tile - 1, tile and tile + 1, shuffled.
  kAnyInteger = 9,   // Random bits, INT_MIN, INT_MAX and neighbours of the local range.
  kLastExperts = 10  // Each token's last slot on the last local expert, as a shared one has it.
};
inline constexpr int kNumIdSpreads = 11;
std::string_view name(IdSpread spread);

struct IdShape {
  int64_t tokens = 0;
  int64_t slots = 1;
  int32_t experts = 1;  // Experts of the model.
  int32_t offset = 0;   // First local expert.
  int32_t local = 1;    // Local experts; offset + local <= experts.
  int32_t tile = 8;     // For kTileCounts.
};

// [tokens, slots], row-major.
std::vector<int32_t> expert_ids(IdSpread spread, const IdShape& shape, Random& random);

}  // namespace narrowfloat::testing
