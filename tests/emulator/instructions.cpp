// The effects of instructions: barriers, copies, warps, matrix multiplications. See machine.h.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <sstream>
#include <stdexcept>

#include "emulator/machine_state.h"

namespace emulator {

Machine& machine() {
  static Machine instance;
  return instance;
}

Fiber& current() { return *machine().current; }

[[noreturn]] void fail(const std::string& what) {
  Fiber& fiber = current();
  std::ostringstream text;
  text << what << " (CTA " << fiber.block->index.x << ", thread " << fiber.number << ")";
  throw std::runtime_error(text.str());
}

void wait_for_grids() { current().block->has_waited = true; }

void trigger_launch() {
  if (current().block->has_waited) return;
  fail("triggers the next launch before its wait for the previous grids");
}

void trigger_launch_before_wait() { current().block->triggers_before_wait = true; }

PhaseBarrier load_barrier(const uint8_t* at) {
  PhaseBarrier barrier;
  std::memcpy(&barrier, at, sizeof(barrier));
  return barrier;
}

static void store_barrier(uint8_t* at, PhaseBarrier barrier) {
  if (barrier.pending == 0 && barrier.bytes() == 0) {
    barrier.bytes_and_phase ^= 1;
    barrier.pending = barrier.count;
  }
  std::memcpy(at, &barrier, sizeof(barrier));
}

void change_barrier(uint8_t* at, int arrivals, int32_t bytes) {
  PhaseBarrier barrier = load_barrier(at);
  barrier.pending = static_cast<int16_t>(barrier.pending - arrivals);
  barrier.bytes_and_phase += 2 * bytes;
  if (barrier.pending < 0) fail("more arrivals at a barrier than its phase has");
  store_barrier(at, barrier);
}

bool is_ready(const Wait& wait) {
  switch (wait.kind) {
    case Wait::Kind::kNone:
      return true;
    case Wait::Kind::kGeneration:
      return *wait.generation != wait.seen;
    case Wait::Kind::kPhase:
      return load_barrier(wait.barrier).phase() != wait.parity;
    case Wait::Kind::kPause:
      return machine().round >= wait.round;
    case Wait::Kind::kEnded:
      return false;
  }
  return false;
}

void wait_until(const Wait& wait) {
  Machine& m = machine();
  Fiber& fiber = current();
  fiber.wait = wait;
  // In order, a thread goes on as far as it can; else any other may come first.
  if (is_ready(wait) && !m.is_late) {
    fiber.wait.kind = Wait::Kind::kNone;
    return;
  }
  switch_to(fiber.point, m.scheduler);
  fiber.wait.kind = Wait::Kind::kNone;
}

void pause() {
  Machine& m = machine();
  if (!m.is_late) return;
  const uint64_t most = m.random() % 4 == 0 ? 100 : 8;
  wait_until({.kind = Wait::Kind::kPause, .round = m.round + m.random() % most, .what = "a pause"});
}

void spin() {
  Machine& m = machine();
  const uint64_t rounds = m.is_late ? 1 + m.random() % 8 : 1;
  wait_until({.kind = Wait::Kind::kPause, .round = m.round + rounds, .what = "memory"});
}

uint64_t time_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

void store_relaxed(std::function<void()> store) {
  if (!machine().is_late) return store();
  current().copies.push_back(std::move(store));
}

void fence() {
  Fiber& fiber = current();
  while (!fiber.copies.empty()) {
    fiber.copies.front()();
    fiber.copies.pop_front();
  }
}

void arrive_at(Barrier& barrier, int expected) {
  if (++barrier.arrived < expected) return;
  barrier.arrived = 0;
  barrier.result = barrier.votes;
  barrier.votes = 0;
  ++barrier.generation;
}

void finish_exchange(LaneExchange& exchange, unsigned mask, unsigned alive) {
  if (exchange.arrived == 0 || (mask & alive & ~exchange.arrived) != 0) return;
  exchange.values[exchange.generation % 2].present = exchange.arrived;
  exchange.arrived = 0;
  ++exchange.generation;
}

int lane() { return current().number % 32; }
int warp() { return current().number / 32; }

void sync_block() { sync_block_or(0); }

int sync_block_or(int predicate) {
  Block& block = *current().block;
  Barrier& barrier = block.named[0];
  const uint64_t seen = barrier.generation;
  barrier.votes |= static_cast<int>(predicate != 0);
  arrive_at(barrier, block.alive);
  wait_until({.kind = Wait::Kind::kGeneration,
              .generation = &barrier.generation,
              .seen = seen,
              .what = "__syncthreads()"});
  return barrier.result;
}

void sync_named(int id, int threads) {
  if (id < 0 || id >= kNamedBarriers) fail("a named barrier that there is not");
  Barrier& barrier = current().block->named[id];
  const uint64_t seen = barrier.generation;
  arrive_at(barrier, threads);
  wait_until({.kind = Wait::Kind::kGeneration,
              .generation = &barrier.generation,
              .seen = seen,
              .what = "a named barrier"});
}

const LaneValues& exchange_lanes(unsigned mask, uint64_t bits) {
  Fiber& fiber = current();
  const auto warp = static_cast<size_t>(fiber.number / 32);
  LaneExchange& exchange = fiber.block->warps[warp][mask];
  const uint64_t seen = exchange.generation;
  LaneValues& values = exchange.values[seen % 2];
  const int own = fiber.number % 32;
  if ((mask >> own & 1U) == 0) fail("a warp instruction whose mask lacks the thread itself");
  values.bits[own] = bits;
  exchange.arrived |= 1U << own;
  finish_exchange(exchange, mask, fiber.block->alive_lanes[warp]);
  wait_until({.kind = Wait::Kind::kGeneration,
              .generation = &exchange.generation,
              .seen = seen,
              .what = "the lanes of its warp"});
  return values;
}

uint32_t cluster_rank() { return static_cast<uint32_t>(current().block->rank); }
uint32_t cluster_size() { return static_cast<uint32_t>(current().block->cluster->blocks.size()); }

void arrive_at_cluster() {
  Fiber& fiber = current();
  Cluster& cluster = *fiber.block->cluster;
  if (fiber.cluster_arrival) fail("a second arrival at the cluster's barrier without a wait");
  fiber.cluster_arrival = cluster.barrier.generation;
  arrive_at(cluster.barrier, cluster.alive);
}

void wait_for_cluster() {
  Fiber& fiber = current();
  if (!fiber.cluster_arrival) fail("a wait at the cluster's barrier without an arrival");
  wait_until({.kind = Wait::Kind::kGeneration,
              .generation = &fiber.block->cluster->barrier.generation,
              .seen = *fiber.cluster_arrival,
              .what = "the cluster"});
  fiber.cluster_arrival.reset();
}

uint8_t* dynamic_shared() { return current().block->shared; }

uint32_t shared_address(const void* pointer) {
  const auto at = static_cast<const uint8_t*>(pointer) - current().block->shared;
  if (at < 0 || at > static_cast<std::ptrdiff_t>(machine().shared_bytes)) {
    fail("the address of something that is not in dynamic shared memory");
  }
  return static_cast<uint32_t>(at);
}

uint8_t* shared_memory_of(uint32_t rank, uint32_t address, uint32_t bytes) {
  const std::vector<Block*>& blocks = current().block->cluster->blocks;
  if (rank >= blocks.size()) fail("a CTA that the cluster does not have");
  if (address + uint64_t{bytes} > machine().shared_bytes) fail("an access beyond shared memory");
  return blocks[rank]->shared + address;
}

uint8_t* shared_memory(uint32_t address, uint32_t bytes) {
  return shared_memory_of(cluster_rank(), address, bytes);
}

void init_barrier(uint32_t barrier, uint32_t arrivals) {
  if (barrier % 8 != 0) fail("a barrier at an address that is not aligned");
  const PhaseBarrier fresh{.count = static_cast<int16_t>(arrivals),
                           .pending = static_cast<int16_t>(arrivals),
                           .bytes_and_phase = 0};
  std::memcpy(shared_memory(barrier, 8), &fresh, sizeof(fresh));
}

void arrive(uint32_t rank, uint32_t barrier) {
  change_barrier(shared_memory_of(rank, barrier, 8), 1, 0);
}

void arrive_and_expect(uint32_t barrier, uint32_t bytes) {
  change_barrier(shared_memory(barrier, 8), 1, static_cast<int32_t>(bytes));
}

void wait_for_phase(uint32_t barrier, uint32_t parity) {
  wait_until({.kind = Wait::Kind::kPhase,
              .barrier = shared_memory(barrier, 8),
              .address = barrier,
              .parity = parity & 1U,
              .what = "a barrier"});
}

void copy_async(std::function<void()> copy) {
  if (!machine().is_late) return copy();
  current().copies.push_back(std::move(copy));
}

void arrive_after_copies(uint32_t barrier) {
  uint8_t* at = shared_memory(barrier, 8);
  copy_async([at] { change_barrier(at, 1, 0); });
}

void wait_for_copies() {
  Fiber& fiber = current();
  while (!fiber.copies.empty()) {
    fiber.copies.front()();
    fiber.copies.pop_front();
  }
}

void end_copy_group() {
  if (!machine().is_late) return;
  Fiber& fiber = current();
  ++fiber.copy_groups;
  fiber.copies.push_back([&fiber] { --fiber.copy_groups; });
}

void wait_for_copy_groups(int newest) {
  Fiber& fiber = current();
  while (fiber.copy_groups > newest) {
    fiber.copies.front()();
    fiber.copies.pop_front();
  }
}

uint16_t own_rank() { return static_cast<uint16_t>(1U << cluster_rank()); }

void copy_to_barrier(std::function<void()> copy, uint16_t ranks, uint32_t barrier, uint32_t bytes) {
  Machine& m = machine();
  std::vector<uint8_t*> barriers;
  for (uint32_t rank = 0; rank < 16; ++rank) {
    if ((ranks >> rank & 1U) != 0) barriers.push_back(shared_memory_of(rank, barrier, 8));
  }
  auto whole = [copy = std::move(copy), barriers, bytes, fiber = &current()] {
    machine().current = fiber;  // For what fail() says.
    copy();
    for (uint8_t* at : barriers) change_barrier(at, 0, -static_cast<int32_t>(bytes));
  };
  if (m.is_late) {
    m.copies.emplace_back(std::move(whole));
  } else {
    whole();
  }
}

void store_async(std::function<void()> store) {
  if (!machine().is_late) return store();
  current().stores.push_back(std::move(store));
}

void wait_for_stores() {
  Fiber& fiber = current();
  if (!fiber.stores.empty()) pause();
  for (const auto& store : fiber.stores) store();
  fiber.stores.clear();
}

// Makes the sums of list[i] NaN if it is the next multiplication on them.
static void hide_sums(std::vector<Multiplication>& list, size_t i) {
  Multiplication& entry = list[i];
  for (size_t other = 0; other < i; ++other) {
    if (list[other].sums == entry.sums) return;
  }
  if (!entry.before.empty()) return;
  entry.before.assign(entry.sums, entry.sums + entry.count);
  std::fill_n(entry.sums, entry.count, __builtin_nanf(""));
}

void multiply_async(float* sums, int count, std::function<void()> multiply) {
  if (!machine().is_late) return multiply();
  Fiber& fiber = current();
  auto& list = fiber.multiplications;
  list.push_back({.sums = sums,
                  .count = count,
                  .before = {},
                  .run = std::move(multiply),
                  .group = fiber.open_group});
  hide_sums(list, list.size() - 1);
}

void commit_multiplications() { ++current().open_group; }

void wait_for_multiplications(int but) {
  Fiber& fiber = current();
  if (!fiber.multiplications.empty()) pause();
  const int end = fiber.open_group - but;
  auto& list = fiber.multiplications;
  size_t done = 0;
  for (; done < list.size() && list[done].group < end; ++done) {
    const Multiplication& entry = list[done];
    std::copy(entry.before.begin(), entry.before.end(), entry.sums);
    entry.run();
  }
  list.erase(list.begin(), list.begin() + static_cast<std::ptrdiff_t>(done));
  for (size_t i = 0; i < list.size(); ++i) hide_sums(list, i);
}

void require(bool holds, const char* what) {
  if (!holds) fail(what);
}

uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t pick = selector >> (4 * i) & 0xFU;
    auto byte = static_cast<uint32_t>(bytes >> (8 * (pick & 7U)) & 0xFFU);
    if ((pick & 8U) != 0) byte = (byte & 0x80U) != 0 ? 0xFFU : 0;  // Its sign, eight times.
    result |= byte << (8 * i);
  }
  return result;
}

}  // namespace emulator
