// See numa_nodes.h. A node has an arena of oneTBB, whose threads stay on the node's processors.
#include "runtime/numa_nodes.h"

#include <algorithm>
#include <array>
#include <exception>
#include <fstream>
#include <string>

#include <tbb/info.h>
#include <tbb/task_arena.h>
#include <tbb/task_group.h>

#include "base/int_math.h"

// Present where a program has these sanitizers.
extern "C" {
// NOLINTBEGIN(readability-identifier-naming): the sanitizers' names.
__attribute__((weak)) void __asan_init();
__attribute__((weak)) void __tsan_init();
// NOLINTEND(readability-identifier-naming)
}

namespace narrowfloat {
namespace {

constexpr size_t kMostNodes = 16;
constexpr int kAnyNode = -1;

// Linux lists one node as "0", two as "0-1".
bool has_several_nodes() {
  std::string online;
  std::ifstream("/sys/devices/system/node/online") >> online;
  return online.find_first_of(",-") != std::string::npos;
}

// oneTBB loads libtbbbind to find the nodes, in a way that ends a program with a sanitizer, and
// spends time on it that a machine with one node need not.
std::vector<int> nodes_of_machine() {
  const bool is_sanitized = __asan_init != nullptr || __tsan_init != nullptr;
  if (is_sanitized || !has_several_nodes()) return {kAnyNode};
  return tbb::info::numa_nodes();
}

tbb::task_arena arena_of(int id) {
  if (id == kAnyNode) return tbb::task_arena();
  return tbb::task_arena(tbb::task_arena::constraints().set_numa_id(id));
}

}  // namespace

NodePart::NodePart(int64_t count, int64_t unit, int node, int nodes) {
  const int64_t units = ceil_div(count, unit);
  begin = std::min(units * node / nodes * unit, count);
  end = std::min(units * (node + 1) / nodes * unit, count);
}

NodePart NodePart::of(int64_t index, int64_t count, int64_t unit, int nodes) {
  // The first node whose end, rounded down to units, is beyond the unit of `index`.
  const int64_t node = ceil_div((index / unit + 1) * nodes, ceil_div(count, unit)) - 1;
  return {count, unit, static_cast<int>(node), nodes};
}

struct NumaNodes::Node {
  explicit Node(int id) : arena(arena_of(id)) {}
  tbb::task_arena arena;
};

NumaNodes::NumaNodes(const std::vector<int>& ids) {
  const bool has_room = ids.size() <= kMostNodes;
  for (const int id : has_room ? ids : std::vector{kAnyNode}) {
    nodes_.push_back(std::make_unique<Node>(id));
  }
}
NumaNodes::~NumaNodes() = default;

const NumaNodes& NumaNodes::all() {
  static const NumaNodes kAll(nodes_of_machine());
  return kAll;
}

int NumaNodes::count() const { return static_cast<int>(nodes_.size()); }

void NumaNodes::for_each(FunctionRef<void(int node)> body) const {
  if (nodes_.size() == 1) return body(0);
  std::array<tbb::task_group, kMostNodes> groups;
  std::array<std::exception_ptr, kMostNodes> errors;
  for (size_t i = 0; i < nodes_.size(); ++i) {
    nodes_[i]->arena.execute([&, i] {
      groups[i].run([&, i] {
        try {
          body(static_cast<int>(i));
        } catch (...) {
          errors[i] = std::current_exception();
        }
      });
    });
  }
  for (size_t i = 0; i < nodes_.size(); ++i) {
    nodes_[i]->arena.execute([&, i] { groups[i].wait(); });
  }
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace narrowfloat
