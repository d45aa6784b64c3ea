// The bytes of a file that are written: a set of disjoint ranges that merge as they touch.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>

namespace narrowfloat {

class Coverage {
 public:
  // Adds [begin, end), which may overlap ranges of the set.
  void add(uint64_t begin, uint64_t end) {
    if (begin == end) return;
    auto next = ranges_.upper_bound(begin);
    if (next != ranges_.begin() && std::prev(next)->second >= begin) {
      --next;
      begin = next->first;
    }
    while (next != ranges_.end() && next->first <= end) {
      end = end > next->second ? end : next->second;
      next = ranges_.erase(next);
    }
    ranges_.emplace(begin, end);
  }

  // First byte at or after `begin` that is not covered.
  [[nodiscard]] uint64_t first_gap(uint64_t begin) const {
    const auto next = ranges_.upper_bound(begin);
    if (next == ranges_.begin() || std::prev(next)->second < begin) return begin;
    return std::prev(next)->second;
  }

 private:
  std::map<uint64_t, uint64_t> ranges_;  // begin -> end.
};

}  // namespace narrowfloat
