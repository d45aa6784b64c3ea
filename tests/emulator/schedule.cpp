// Fibers, and who goes next. See machine.h.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>
#include <sstream>
#include <sys/mman.h>

#include "emulator/machine_state.h"
#include "emulator/runtime.h"

uint3 threadIdx;
uint3 blockIdx;
dim3 blockDim;
dim3 gridDim;

namespace emulator {
namespace {

constexpr size_t kStackBytes = 256 * 1024;
constexpr size_t kGuardBytes = 4096;
constexpr size_t kSharedAlignment = 1024;

// A thread that has ended holds up no barrier.
void leave(Fiber& fiber) {
  Block& block = *fiber.block;
  const auto warp = static_cast<size_t>(fiber.number / 32);
  block.alive_lanes[warp] &= ~(1U << fiber.number % 32);
  for (auto& [mask, exchange] : block.warps[warp]) {
    finish_exchange(exchange, mask, block.alive_lanes[warp]);
  }
  --block.alive;
  Cluster& cluster = *block.cluster;
  --cluster.alive;
  Barrier& all = block.named[0];
  if (all.arrived > 0 && all.arrived == block.alive) {
    --all.arrived;
    arrive_at(all, block.alive);
  }
  // Its own arrival would stand for one of those that are left.
  if (fiber.cluster_arrival == cluster.barrier.generation) --cluster.barrier.arrived;
  if (cluster.barrier.arrived > 0 && cluster.barrier.arrived == cluster.alive) {
    --cluster.barrier.arrived;
    arrive_at(cluster.barrier, cluster.alive);
  }
}

void run_fiber() {
  Machine& m = machine();
  Fiber& fiber = current();
  try {
    (*m.body)();
    fiber.multiplications.clear();  // Their sums were on the kernel's stack.
    wait_for_stores();
  } catch (const std::exception& error) {
    if (m.failure.empty()) m.failure = error.what();
  }
  leave(fiber);
  fiber.wait.kind = Wait::Kind::kEnded;
  switch_to(fiber.point, m.scheduler);
}

void* stack_of(size_t i) {
  Machine& m = machine();
  while (m.stacks.size() <= i) {
    void* stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    // An overflow ends the program instead of changing the next stack.
    if (stack == MAP_FAILED || mprotect(stack, kGuardBytes, PROT_NONE) != 0) throw std::bad_alloc();
    m.stacks.push_back(stack);
  }
  return m.stacks[i];
}

void make_fibers(Block& block) {
  Machine& m = machine();
  const int threads = static_cast<int>(blockDim.x * blockDim.y * blockDim.z);
  block.alive = threads;
  block.warps.resize(static_cast<size_t>(threads + 31) / 32);
  block.alive_lanes.assign(block.warps.size(), 0);
  for (int i = 0; i < threads; ++i) {
    block.alive_lanes[static_cast<size_t>(i) / 32] |= 1U << i % 32;
    Fiber& fiber = m.fibers.emplace_back();
    const auto number = static_cast<unsigned>(i);
    fiber.index = {number % blockDim.x, number / blockDim.x % blockDim.y,
                   number / blockDim.x / blockDim.y};
    fiber.number = i;
    fiber.block = &block;
    fiber.stack = stack_of(m.fibers.size() - 1);
  }
}

std::unique_ptr<Block> make_block(uint3 index, int rank) {
  Machine& m = machine();
  auto block = std::make_unique<Block>();
  block->index = index;
  block->rank = rank;
  block->memory.resize(m.shared_bytes + 2 * kSharedAlignment);
  // Memory that nobody has written has random contents.
  for (uint8_t& byte : block->memory) byte = static_cast<uint8_t>(m.random() | 0x80U);
  const auto at = reinterpret_cast<uintptr_t>(block->memory.data());
  block->shared = block->memory.data() + (kSharedAlignment - at % kSharedAlignment);
  return block;
}

// One of the things that run beside the threads, if there is one.
bool do_one_copy() {
  Machine& m = machine();
  std::vector<Fiber*> with_copies;
  for (Fiber& fiber : m.fibers) {
    if (!fiber.copies.empty()) with_copies.push_back(&fiber);
  }
  const size_t choices = with_copies.size() + m.copies.size();
  if (choices == 0) return false;
  const size_t choice = m.random() % choices;
  if (choice < with_copies.size()) {
    Fiber& fiber = *with_copies[choice];
    m.current = &fiber;
    // All of the thread's: one at a time would take long.
    while (!fiber.copies.empty()) {
      fiber.copies.front()();
      fiber.copies.pop_front();
    }
    return true;
  }
  const auto at = m.copies.begin() + static_cast<std::ptrdiff_t>(choice - with_copies.size());
  const std::function<void()> copy = std::move(*at);
  m.copies.erase(at);
  copy();
  return true;
}

std::string deadlock() {
  Machine& m = machine();
  std::map<std::string, int> waits;
  for (const Fiber& fiber : m.fibers) {
    if (fiber.wait.kind == Wait::Kind::kEnded) continue;
    std::ostringstream text;
    text << "warp " << fiber.number / 32 << " of CTA " << fiber.block->index.x << ": "
         << fiber.wait.what;
    if (fiber.wait.kind == Wait::Kind::kPhase) {
      const PhaseBarrier barrier = load_barrier(fiber.wait.barrier);
      text << " at " << fiber.wait.address << ", parity " << fiber.wait.parity << " ("
           << barrier.pending << " of " << barrier.count << " arrivals and " << barrier.bytes()
           << " bytes are missing)";
    }
    ++waits[text.str()];
  }
  std::ostringstream text;
  text << "no thread can go on:";
  for (const auto& [what, count] : waits) text << "\n  " << count << " threads of " << what;
  return text.str();
}

// Runs all CTAs that are there to their end.
void run_resident_blocks() {
  Machine& m = machine();
  size_t at = 0;
  size_t ended = 0;
  while (ended < m.fibers.size() && m.failure.empty()) {
    bool found = false;
    ++m.round;
    if (m.is_late && m.random() % 4 == 0) do_one_copy();
    const size_t first = m.is_late ? m.random() % m.fibers.size() : at;
    for (size_t i = 0; i < m.fibers.size(); ++i) {
      const size_t number = (first + i) % m.fibers.size();
      Fiber& fiber = m.fibers[number];
      if (fiber.wait.kind == Wait::Kind::kEnded || !is_ready(fiber.wait)) continue;
      m.current = &fiber;
      threadIdx = fiber.index;
      blockIdx = fiber.block->index;
      switch_to(m.scheduler, fiber.point);
      if (fiber.wait.kind == Wait::Kind::kEnded) ++ended;
      found = true;
      at = number + 1;
      // In order: the next ones of the round. At random: any other.
      if (m.is_late && m.random() % 8 == 0) break;
    }
    if (found || do_one_copy()) continue;
    const bool pauses = std::ranges::any_of(
        m.fibers, [](const Fiber& fiber) { return fiber.wait.kind == Wait::Kind::kPause; });
    if (!pauses) m.failure = deadlock();
  }
  // Copies that a kernel has started are done before it ends.
  while (m.failure.empty() && do_one_copy()) {
  }
  for (const auto& block : m.blocks) {
    if (!m.is_programmatic || block->has_waited) continue;
    if (!m.failure.empty()) continue;
    m.failure =
        "CTA " + std::to_string(block->index.x) + " ends before its wait for the previous grids";
  }
}

// Runs `ctas` CTAs at once, in clusters.
void run_blocks(uint3 first, unsigned cluster_ctas, unsigned ctas) {
  Machine& m = machine();
  m.blocks.clear();
  m.clusters.clear();
  m.fibers.clear();
  m.copies.clear();
  const size_t threads = static_cast<size_t>(blockDim.x) * blockDim.y * blockDim.z;
  m.fibers.reserve(threads * ctas);
  for (unsigned i = 0; i < ctas; ++i) {
    const unsigned rank = i % cluster_ctas;
    if (rank == 0) m.clusters.emplace_back();
    m.blocks.push_back(make_block({first.x + i, first.y, first.z}, static_cast<int>(rank)));
    Block& block = *m.blocks.back();
    block.cluster = &m.clusters.back();
    make_fibers(block);
    block.cluster->blocks.push_back(&block);
    block.cluster->alive += block.alive;
  }
  for (Fiber& fiber : m.fibers) {
    getcontext(&fiber.point.first);
    fiber.point.first.uc_stack.ss_sp = fiber.stack;
    fiber.point.first.uc_stack.ss_size = kStackBytes;
    fiber.point.first.uc_link = nullptr;
    makecontext(&fiber.point.first, run_fiber, 0);
  }
  try {
    run_resident_blocks();
  } catch (
      const std::exception& error) {  // An exception of a copy; a thread's own end in run_fiber().
    m.failure = error.what();
  }
}

unsigned cluster_blocks_of(const cudaLaunchConfig_t& config) {
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    if (config.attrs[i].id == cudaLaunchAttributeClusterDimension) {
      return config.attrs[i].val.clusterDim.x;
    }
  }
  return 1;
}

bool has_attribute(const cudaLaunchConfig_t& config, cudaLaunchAttributeID id) {
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    if (config.attrs[i].id == id) return true;
  }
  return false;
}

// A launch asks for these beside its extents.
struct LaunchStyle {
  unsigned cluster = 1;
  bool is_programmatic = false;
  bool is_cooperative = false;
};

// As the launch of a GPU judges it.
bool can_launch(const cudaLaunchConfig_t& config, unsigned cluster) {
  const uint64_t threads = uint64_t{config.blockDim.x} * config.blockDim.y * config.blockDim.z;
  return threads > 0 && threads <= 1024 &&
         config.dynamicSmemBytes <= static_cast<size_t>(shared_bytes_limit()) && cluster > 0 &&
         cluster <= 8 && config.gridDim.x % cluster == 0;
}

unsigned seed() {
  const char* text = std::getenv("NARROWFLOAT_EMULATOR_SEED");
  return text == nullptr ? 0 : static_cast<unsigned>(std::strtoul(text, nullptr, 10));
}

cudaError_t run_grid(const cudaLaunchConfig_t& config, const LaunchStyle& style,
                     const std::function<void()>& body) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  Machine& m = machine();
  static unsigned launches = 0;
  m.random.seed(seed() + 7919 * launches++);
  m.is_late = seed() != 0;
  gridDim = config.gridDim;
  blockDim = config.blockDim;
  m.shared_bytes = config.dynamicSmemBytes;
  m.body = &body;
  m.failure.clear();
  m.is_programmatic = style.is_programmatic;
  if (!can_launch(config, style.cluster)) return cudaErrorInvalidConfiguration;
  const unsigned at_once = style.is_cooperative ? gridDim.x : style.cluster;
  for (unsigned z = 0; z < gridDim.z; ++z) {
    for (unsigned y = 0; y < gridDim.y; ++y) {
      for (unsigned x = 0; x < gridDim.x && m.failure.empty(); x += at_once) {
        run_blocks({x, y, z}, style.cluster, at_once);
      }
    }
  }
  if (m.failure.empty()) return cudaSuccess;
  std::fprintf(stderr, "emulator: %s\n", m.failure.c_str());
  return fail_device();
}

}  // namespace

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel,
                   std::function<void()> body) {
  if (config.dynamicSmemBytes > shared_bytes_of(kernel)) return refuse_launch();
  // The attributes are those of the caller and may be gone when the kernel runs.
  const LaunchStyle style{
      .cluster = cluster_blocks_of(config),
      .is_programmatic = has_attribute(config, cudaLaunchAttributeProgrammaticStreamSerialization),
      .is_cooperative = has_attribute(config, cudaLaunchAttributeCooperative)};
  return queue(config.stream, [config, style, body] { return run_grid(config, style, body); });
}

}  // namespace emulator
