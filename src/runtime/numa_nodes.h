// Work split over the NUMA nodes of a machine: data that a node's threads write first lie in its
// memory, and are read fastest by threads of the same node.
//
// oneTBB knows the nodes where its library libtbbbind is installed; otherwise, on most machines,
// and in programs with a sanitizer, there is one, and nothing changes.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/function_ref.h"

namespace narrowfloat {

// The part of [0, count) that belongs to a node: whole units, nearly the same for every node.
struct NodePart {
  int64_t begin;
  int64_t end;

  NodePart(int64_t count, int64_t unit, int node, int nodes);
  // The part that has `index`.
  static NodePart of(int64_t index, int64_t count, int64_t unit, int nodes);
};

class NumaNodes {
 public:
  // ids: those of tbb::info::numa_nodes(); -1 stands for any node.
  explicit NumaNodes(const std::vector<int>& ids);
  ~NumaNodes();
  NumaNodes(const NumaNodes&) = delete;
  NumaNodes& operator=(const NumaNodes&) = delete;

  // Those of this machine.
  static const NumaNodes& all();

  [[nodiscard]] int count() const;
  // Calls body(node) for every node at the same time; loops of parallel.h in it run on threads of
  // the node. The limit on the number of threads holds for all nodes together. The first exception
  // reaches the caller.
  void for_each(FunctionRef<void(int node)> body) const;

 private:
  struct Node;
  std::vector<std::unique_ptr<Node>> nodes_;
};

}  // namespace narrowfloat
