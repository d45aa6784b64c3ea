// Placement of experts on ranks: copies of the heavy ones, the heaviest first to the lightest rank,
// then exchanges. See expert_placement.h.
#include "narrowfloat/expert_placement.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/assert.h"
#include "base/throw_error.h"
#include "checkpoint/file_io.h"
#include "checkpoint/json_guard.h"
#include "narrowfloat/expert_parallel.h"
#include "narrowfloat/safetensors.h"

namespace narrowfloat {
namespace {

using PlacementJson = nlohmann::ordered_json;

constexpr std::string_view kPlacementFormat = "narrowfloat expert placement";
constexpr int kPlacementVersion = 1;
constexpr uint64_t kMaxPlacementBytes = uint64_t{64} << 20U;
// Many times the experts of any model; the exchanges take seconds.
constexpr int64_t kMaxPlaces = 1 << 14;

// One rank while places are filled.
struct RankPlaces {
  std::vector<int32_t> experts;
  size_t capacity = 0;
  double load = 0;

  [[nodiscard]] size_t num_free() const { return capacity - experts.size(); }
  [[nodiscard]] bool holds(int32_t expert) const {
    return std::find(experts.begin(), experts.end(), expert) != experts.end();
  }
};

class PlacementSearch {
 public:
  PlacementSearch(std::span<const double> loads, int ranks, int32_t redundant)
      : loads_(loads), copies_(loads.size(), 1), ranks_(static_cast<size_t>(ranks)) {
    const auto places = static_cast<int32_t>(loads.size()) + redundant;
    for (int rank = 0; rank < ranks; ++rank) {
      ranks_[static_cast<size_t>(rank)].capacity =
          static_cast<size_t>(expert_shard(places, ranks, rank).count);
    }
    for (int32_t i = 0; i < redundant; ++i) ++copies_[heaviest_with_room()];
  }

  ExpertPlaces run() {
    // Filling the rank with the most free places first always ends well, as all have about as many;
    // the rank with the least load may leave too few ranks for the last copies.
    const bool is_filled = fill(Prefer::kLeastLoad) || fill(Prefer::kMostFree);
    NF_ASSERT(is_filled);
    while (exchange_with_heaviest()) {
    }
    ExpertPlaces places;
    for (RankPlaces& rank : ranks_) {
      std::sort(rank.experts.begin(), rank.experts.end());
      places.insert(places.end(), rank.experts.begin(), rank.experts.end());
    }
    return places;
  }

 private:
  enum class Prefer { kLeastLoad, kMostFree };

  [[nodiscard]] double share(size_t expert) const {
    return loads_[expert] / static_cast<double>(copies_[expert]);
  }

  // The expert with the most load for each copy that is not on all ranks yet.
  [[nodiscard]] size_t heaviest_with_room() const {
    size_t best = loads_.size();
    for (size_t expert = 0; expert < loads_.size(); ++expert) {
      if (copies_[expert] == ranks_.size()) continue;
      if (best == loads_.size() || share(expert) > share(best)) best = expert;
    }
    return best;
  }

  // Experts with many copies come first, while every rank has room. Each takes the preferred ranks,
  // but before them those that have as many free places as there are experts left: a rank takes an
  // expert once, so these need it. Returns false where an expert finds too few ranks.
  bool fill(Prefer prefer) {
    for (RankPlaces& rank : ranks_) {
      rank.experts.clear();
      rank.load = 0;
    }
    std::vector<size_t> order(loads_.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return copies_[a] != copies_[b] ? copies_[a] > copies_[b] : share(a) > share(b);
    });
    for (size_t i = 0; i < order.size(); ++i) {
      const size_t left = order.size() - i;
      std::vector<RankPlaces*> candidates;
      for (RankPlaces& rank : ranks_) {
        if (rank.num_free() > 0) candidates.push_back(&rank);
      }
      std::stable_sort(candidates.begin(), candidates.end(),
                       [&](const RankPlaces* a, const RankPlaces* b) {
                         const bool a_must = a->num_free() >= left;
                         const bool b_must = b->num_free() >= left;
                         if (a_must != b_must) return a_must;
                         if (prefer == Prefer::kLeastLoad) return a->load < b->load;
                         return a->num_free() > b->num_free();
                       });
      if (candidates.size() < copies_[order[i]]) return false;
      for (size_t copy = 0; copy < copies_[order[i]]; ++copy) {
        candidates[copy]->experts.push_back(static_cast<int32_t>(order[i]));
        candidates[copy]->load += share(order[i]);
      }
    }
    return true;
  }

  // Makes the exchange of two experts that lowers the heavier rank of the two most; false if there
  // is none.
  bool exchange_with_heaviest() {
    RankPlaces& heavy =
        *std::max_element(ranks_.begin(), ranks_.end(),
                          [](const RankPlaces& a, const RankPlaces& b) { return a.load < b.load; });
    double best = heavy.load * (1 - 1e-12);  // A gain that is more than rounding.
    RankPlaces* other = nullptr;
    int32_t* from = nullptr;
    int32_t* to = nullptr;
    for (RankPlaces& rank : ranks_) {
      if (&rank == &heavy) continue;
      for (int32_t& mine : heavy.experts) {
        if (rank.holds(mine)) continue;
        for (int32_t& theirs : rank.experts) {
          const double moved =
              share(static_cast<size_t>(mine)) - share(static_cast<size_t>(theirs));
          const double after = std::max(heavy.load - moved, rank.load + moved);
          if (after >= best || heavy.holds(theirs)) continue;
          best = after;
          other = &rank;
          from = &mine;
          to = &theirs;
        }
      }
    }
    if (other == nullptr) return false;
    const double moved = share(static_cast<size_t>(*from)) - share(static_cast<size_t>(*to));
    heavy.load -= moved;
    other->load += moved;
    std::swap(*from, *to);
    return true;
  }

  std::span<const double> loads_;
  std::vector<size_t> copies_;  // How many places each expert has.
  std::vector<RankPlaces> ranks_;
};

[[noreturn]] void refuse_file(std::string_view source, std::string_view message) {
  throw_error(ErrorKind::kCorruptData, "{}: {}", source, message);
}

PlacementJson read_object(const std::string& path) {
  const std::string text = read_file_bounded(path, kMaxPlacementBytes);
  check_json_object(text, printable(path));
  return PlacementJson::parse(text);
}

// The member `name`, an object of lists of whole numbers below `limit`.
std::map<std::string, std::vector<int64_t>> read_lists(const PlacementJson& document,
                                                       const char* name, std::string_view source) {
  const auto layers = document.find(name);
  if (layers == document.end() || !layers->is_object() || layers->empty()) {
    refuse_file(source, fmt::format("expected \"{}\": {{LAYER: [numbers], ...}}", name));
  }
  std::map<std::string, std::vector<int64_t>> lists;
  for (const auto& [layer, list] : layers->items()) {
    if (!list.is_array() || list.empty() || list.size() > kMaxPlaces) {
      refuse_file(source, fmt::format("{} of layer '{}': expected a list of 1 to {} numbers", name,
                                      printable(layer), kMaxPlaces));
    }
    for (const PlacementJson& value : list) {
      if (!value.is_number_integer() || value < 0) {
        refuse_file(source,
                    fmt::format("{} of layer '{}': expected whole numbers from 0 on, got {}", name,
                                printable(layer), printable(value.dump())));
      }
      lists[layer].push_back(value.get<int64_t>());
    }
  }
  return lists;
}

}  // namespace

ExpertPlaces place_experts(std::span<const double> loads, int ranks, int32_t redundant) {
  const auto experts = static_cast<int64_t>(loads.size());
  if (ranks < 1 || ranks > experts || experts > kMaxPlaces) {
    throw_invalid("ranks: expected 1 to the {} experts of loads (at most {}), got {}", experts,
                  kMaxPlaces, ranks);
  }
  const int64_t most = std::min(experts * (ranks - 1), kMaxPlaces - experts);
  if (redundant < 0 || redundant > most) {
    throw_invalid("redundant: expected 0 to {} ({} experts, {} ranks), got {}", most, experts,
                  ranks, redundant);
  }
  for (size_t expert = 0; expert < loads.size(); ++expert) {
    if (!std::isfinite(loads[expert]) || loads[expert] < 0) {
      throw_invalid("loads: expected finite numbers from 0 on, got {} for expert {}", loads[expert],
                    expert);
    }
  }
  return PlacementSearch(loads, ranks, redundant).run();
}

std::vector<double> rank_loads(std::span<const int32_t> places, std::span<const double> loads,
                               int ranks) {
  check_places(places, static_cast<int32_t>(loads.size()), ranks);
  std::vector<double> copies(loads.size(), 0);
  for (const int32_t expert : places) ++copies[static_cast<size_t>(expert)];
  std::vector<double> sums(static_cast<size_t>(ranks), 0);
  for (int rank = 0; rank < ranks; ++rank) {
    const ExpertShard shard = expert_shard(static_cast<int32_t>(places.size()), ranks, rank);
    for (const int32_t expert :
         places.subspan(static_cast<size_t>(shard.offset), static_cast<size_t>(shard.count))) {
      const auto i = static_cast<size_t>(expert);
      sums[static_cast<size_t>(rank)] += loads[i] / copies[i];
    }
  }
  return sums;
}

double load_imbalance(std::span<const double> rank_loads) {
  const double total = std::accumulate(rank_loads.begin(), rank_loads.end(), 0.0);
  if (!(total > 0)) return 1;
  return *std::max_element(rank_loads.begin(), rank_loads.end()) *
         static_cast<double>(rank_loads.size()) / total;
}

void check_places(std::span<const int32_t> places, int32_t experts, int ranks) {
  if (experts < 1 || ranks < 1 || static_cast<int64_t>(places.size()) < experts ||
      static_cast<int64_t>(places.size()) > kMaxPlaces ||
      static_cast<int64_t>(places.size()) < ranks) {
    throw_invalid(
        "places: expected at least one for each of {} experts and {} ranks, at most {}, "
        "got {}",
        experts, ranks, kMaxPlaces, places.size());
  }
  std::vector<int> last_rank(static_cast<size_t>(experts), -1);
  for (int rank = 0; rank < ranks; ++rank) {
    const ExpertShard shard = expert_shard(static_cast<int32_t>(places.size()), ranks, rank);
    for (const int32_t expert :
         places.subspan(static_cast<size_t>(shard.offset), static_cast<size_t>(shard.count))) {
      if (expert < 0 || expert >= experts) {
        throw_invalid("places: expected experts from 0 to {}, got {}", experts - 1, expert);
      }
      int& last = last_rank[static_cast<size_t>(expert)];
      if (last == rank) {
        throw_invalid("places: rank {} has expert {} twice; give the copies to different ranks",
                      rank, expert);
      }
      last = rank;
    }
  }
  const auto missing = std::find(last_rank.begin(), last_rank.end(), -1);
  if (missing != last_rank.end()) {
    throw_invalid("places: expert {} has none", missing - last_rank.begin());
  }
}

std::vector<int32_t> place_of_expert(std::span<const int32_t> places, int32_t experts, int rank) {
  std::vector<std::vector<int32_t>> all(static_cast<size_t>(experts));
  for (size_t place = 0; place < places.size(); ++place) {
    all[static_cast<size_t>(places[place])].push_back(static_cast<int32_t>(place));
  }
  std::vector<int32_t> chosen;
  chosen.reserve(all.size());
  for (const std::vector<int32_t>& copies : all) {
    chosen.push_back(copies[static_cast<size_t>(rank) % copies.size()]);
  }
  return chosen;
}

std::map<std::string, std::vector<double>> load_expert_loads(const std::string& path) {
  std::map<std::string, std::vector<double>> loads;
  size_t experts = 0;
  for (const auto& [layer, counts] : read_lists(read_object(path), "loads", printable(path))) {
    if (experts != 0 && counts.size() != experts) {
      refuse_file(printable(path), fmt::format("loads of layer '{}': expected {} numbers as the "
                                               "other layers have, got {}",
                                               printable(layer), experts, counts.size()));
    }
    experts = counts.size();
    loads[layer].assign(counts.begin(), counts.end());
  }
  return loads;
}

std::string ExpertPlacement::to_json() const {
  std::string text = fmt::format(
      "{{\n \"format\": \"{}\",\n \"format_version\": {},\n \"experts\": {},\n"
      " \"ranks\": {},\n \"places\": {{",
      kPlacementFormat, kPlacementVersion, experts, ranks);
  bool is_first = true;
  for (const auto& [layer, places] : layers) {
    text += fmt::format("{}\n  {}: [{}]", is_first ? "" : ",",
                        PlacementJson(layer).dump(-1, ' ', /*ensure_ascii=*/true),
                        fmt::join(places, ","));
    is_first = false;
  }
  return text + "\n }\n}\n";
}

ExpertPlacement ExpertPlacement::load(const std::string& path) {
  const std::string source = printable(path);
  const PlacementJson document = read_object(path);
  if (document.value("format", PlacementJson()) != kPlacementFormat ||
      document.value("format_version", PlacementJson()) != kPlacementVersion) {
    refuse_file(source, fmt::format("expected \"format\": \"{}\", \"format_version\": {}; "
                                    "narrowfloat moe place writes such files",
                                    kPlacementFormat, kPlacementVersion));
  }
  const auto number = [&](const char* name) {
    const auto value = document.find(name);
    const bool is_count = value != document.end() && value->is_number_integer() && *value >= 1 &&
                          *value <= kMaxPlaces;
    if (!is_count) {
      refuse_file(source, fmt::format("\"{}\": expected a number from 1 to {}", name, kMaxPlaces));
    }
    return value->get<int32_t>();
  };
  ExpertPlacement placement;
  placement.experts = number("experts");
  placement.ranks = number("ranks");
  for (const auto& [layer, list] : read_lists(document, "places", source)) {
    ExpertPlaces places;
    for (const int64_t expert : list) {
      places.push_back(static_cast<int32_t>(std::min(expert, kMaxPlaces)));
    }
    try {
      check_places(places, placement.experts, placement.ranks);
    } catch (const Error& error) {
      refuse_file(source, fmt::format("layer '{}': {}", printable(layer), error.what()));
    }
    placement.layers[layer] = std::move(places);
  }
  return placement;
}

void ExpertPlacement::save(const std::string& path, bool replace) const {
  write_file_atomically(path, to_json(), replace ? Replace::kYes : Replace::kNo);
}

}  // namespace narrowfloat
