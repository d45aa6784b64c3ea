// Which experts each rank of an expert-parallel layer holds, chosen from recorded loads, so that no
// rank has much more work than the others. docs/parallel.md shows what it gains.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "narrowfloat/export.h"

namespace narrowfloat {

// The expert at each place. Rank r holds the places expert_shard(P, R, r) of the P. An expert may
// have several places, on different ranks: each source rank uses one of them (place_of_expert()).
using ExpertPlaces = std::vector<int32_t>;

// Chooses E + redundant places for E = loads.size() experts on `ranks` ranks.
//   loads      how many tokens chose each expert; finite, not negative
//   redundant  further places: for the experts with the highest load a place, again and again
// Copies go, heaviest first, to the rank with the least load; then places are exchanged between the
// heaviest rank and others as long as that lowers the heavier one of the two. The same for the same
// arguments. Throws kInvalidArgument where ranks is not within 1 to E, `redundant` not within 0 to
// E * (ranks - 1), or there would be more than 16384 places.
NARROWFLOAT_API ExpertPlaces place_experts(std::span<const double> loads, int ranks,
                                           int32_t redundant = 0);

// The load of each rank: an expert's load is shared evenly between its places.
NARROWFLOAT_API std::vector<double> rank_loads(std::span<const int32_t> places,
                                               std::span<const double> loads, int ranks);
// The largest load over the mean; 1 where there is no load.
NARROWFLOAT_API double load_imbalance(std::span<const double> rank_loads);

// Throws kInvalidArgument unless every expert 0 to experts - 1 has a place, nothing else has one,
// and no rank has two of the same expert.
NARROWFLOAT_API void check_places(std::span<const int32_t> places, int32_t experts, int ranks);

// Returns for each expert the place that tokens of `rank` go to: of c places the (rank mod c)-th.
NARROWFLOAT_API std::vector<int32_t> place_of_expert(std::span<const int32_t> places,
                                                     int32_t experts, int rank);

// Loads of layers by name, as {"loads": {"3": [120, 7, ...], ...}}: whole counts of one length.
// Throws kIo and kCorruptData.
NARROWFLOAT_API std::map<std::string, std::vector<double>> load_expert_loads(
    const std::string& path);

// Placements of layers by name.
struct ExpertPlacement {
  int32_t experts = 0;
  int ranks = 1;
  std::map<std::string, ExpertPlaces> layers;

  [[nodiscard]] NARROWFLOAT_API std::string to_json() const;
  // Throws kIo and kCorruptData; what it returns passes check_places().
  NARROWFLOAT_API static ExpertPlacement load(const std::string& path);
  NARROWFLOAT_API void save(const std::string& path, bool replace) const;
};

}  // namespace narrowfloat
