// The loop over the strips of some experts or row blocks. A strip belongs to a NUMA node, which
// packs it, so that it lies in the node's memory, and multiplies it.
#pragma once

#include <algorithm>

#include "runtime/numa_nodes.h"
#include "runtime/parallel.h"

namespace narrowfloat {

// Strips that stay together: pages of memory belong to one node then, but for those at the ends.
inline constexpr int64_t kNodeStrips = 16;

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
