// The loop over the strips of some experts or row blocks. A strip belongs to a NUMA node, which
// packs it, so that it lies in the node's memory, and multiplies it.
#pragma once

#include <algorithm>

#include "narrowfloat/runtime.h"
#include "runtime/numa_nodes.h"
#include "runtime/parallel.h"

namespace narrowfloat {

// Strips that stay together on a node.
inline constexpr int64_t kNodeStrips = 16;

// The order of strips in memory: those of a node lie together for all experts, since pages, of
// which large ones hold dozens of strips, would otherwise be shared at every expert's border.
//
//   [nodes][experts][strips of the node]; with one node [experts][strips]
class StripPlaces {
 public:
  StripPlaces(int64_t experts, int64_t strips) : experts_(experts), strips_(strips) {}

  [[nodiscard]] int64_t of(int64_t expert, int64_t strip) const {
    const int nodes = NumaNodes::all().count();
    if (nodes == 1) return expert * strips_ + strip;
    const NodePart part = NodePart::of(strip, strips_, kNodeStrips, nodes);
    return experts_ * part.begin + expert * (part.end - part.begin) + strip - part.begin;
  }

 private:
  int64_t experts_;
  int64_t strips_;
};

// A grain for a loop over so many strips whose tasks copy the rows of their block first: few
// copies, and still some tens of ranges for every thread.
inline int64_t copying_grain(int64_t strips) {
  constexpr int64_t kRangesOfThread = 32;
  return std::max<int64_t>(1, strips / (kRangesOfThread * num_threads()));
}

// Calls run(block, strip, most) on all cores until every strip of every block had its turn: it
// takes the strip and up to `most` - 1 that follow, and returns their number. node_strips: as
// kNodeStrips, for a loop over pairs half of it.
template <typename Run>
void for_each_strip(int64_t blocks, int64_t strips, int64_t grain, const Run& run,
                    int64_t node_strips = kNodeStrips) {
  const NumaNodes& nodes = NumaNodes::all();
  nodes.for_each([&](int node) {
    const NodePart part(strips, node_strips, node, nodes.count());
    const int64_t own = part.end - part.begin;
    parallel_for(blocks * own, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end;) {
        i += run(i / own, part.begin + i % own, std::min(end - i, own - i % own));
      }
    });
  });
}

}  // namespace narrowfloat
