// Lists of ranks as text.
#include "runtime/comm/rank_groups.h"

#include <algorithm>

#include <fmt/format.h>

namespace narrowfloat {

std::string name_ranks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t first = 0, last = 0; first < ranks.size(); first = last + 1) {
    last = first;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (last == first + 1) last = first;  // Two neighbours are two numbers, three are a range.
    if (first > 0) text += ", ";
    text += last == first ? fmt::format("{}", ranks[first])
                          : fmt::format("{} to {}", ranks[first], ranks[last]);
  }
  return text;
}

std::vector<RankGroup> group_ranks(const std::vector<std::string>& texts) {
  std::vector<RankGroup> groups;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    auto group = std::find_if(groups.begin(), groups.end(),
                              [&](const RankGroup& g) { return g.text == texts[rank]; });
    if (group == groups.end()) group = groups.insert(group, RankGroup{{}, texts[rank]});
    group->ranks.push_back(static_cast<int>(rank));
  }
  return groups;
}

}  // namespace narrowfloat
