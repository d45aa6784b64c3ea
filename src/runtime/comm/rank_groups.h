// How messages name ranks, and which ranks said the same.
#pragma once

#include <string>
#include <vector>

namespace narrowfloat {

// "rank 2", "ranks 0, 3 to 7, 9". The ranks are ascending.
std::string name_ranks(const std::vector<int>& ranks);

struct RankGroup {
  std::vector<int> ranks;
  std::string text;
};
// The different texts, in the order of the lowest rank that gave them. texts[r] is that of rank r.
std::vector<RankGroup> group_ranks(const std::vector<std::string>& texts);

}  // namespace narrowfloat
