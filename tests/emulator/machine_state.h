// The state of the emulated GPU and how its threads wait: what schedule.cpp and instructions.cpp
// share.
#pragma once

#include <csetjmp>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <ucontext.h>
#include <vector>

#include "emulator/machine.h"

namespace emulator {

inline constexpr int kNamedBarriers = 16;

// Why a fiber does not go on.
struct Wait {
  enum class Kind { kNone, kGeneration, kPhase, kPause, kEnded } kind = Kind::kNone;
  const uint64_t* generation = nullptr;  // kGeneration: until it is not `seen`.
  uint64_t seen = 0;
  const uint8_t* barrier = nullptr;  // kPhase.
  uint32_t address = 0;
  uint32_t parity = 0;
  uint64_t round = 0;  // kPause: the scheduler's.
  const char* what = "";
};

// Arrivals of threads; a generation ends with the last.
struct Barrier {
  int arrived = 0;
  uint64_t generation = 0;
  int votes = 0;
  int result = 0;
};

struct LaneExchange {
  unsigned arrived = 0;
  uint64_t generation = 0;
  LaneValues values[2];
};

struct Block;

struct Multiplication {
  float* sums;
  int count;
  std::vector<float> before;  // Sums before the first multiplication.
  std::function<void()> run;
  int group;
};

// A switch point is the place at which a fiber, or the scheduler, goes on. swapcontext() makes a
// system call each time, for the signal mask, which nobody here changes; so jumps switch between
// fibers, and only the first turn of one starts with the context that has its stack.
struct SwitchPoint {
  ucontext_t first{};  // The scheduler has none.
  jmp_buf next;
  bool has_run = false;
};

inline void switch_to(SwitchPoint& from, SwitchPoint& to) {
  from.has_run = true;
  if (_setjmp(from.next) != 0) return;
  if (to.has_run) _longjmp(to.next, 1);
  setcontext(&to.first);
}

struct Fiber {
  SwitchPoint point;
  void* stack = nullptr;
  uint3 index{};
  int number = 0;  // In its CTA.
  Block* block = nullptr;
  Wait wait;
  std::deque<std::function<void()>> copies;  // In order; arrivals among them.
  int copy_groups = 0;                       // Whose end is among them.
  std::vector<std::function<void()>> stores;
  std::vector<Multiplication> multiplications;
  int open_group = 0;
  std::optional<uint64_t> cluster_arrival;  // The cluster barrier's generation, until the wait.
};

// CTAs that share a barrier and each other's shared memory.
struct Cluster {
  Barrier barrier;
  int alive = 0;  // Threads.
  std::vector<Block*> blocks;
};

struct Block {
  uint3 index{};
  int rank = 0;
  Cluster* cluster = nullptr;
  uint8_t* shared = nullptr;
  std::vector<uint8_t> memory;
  int alive = 0;
  Barrier named[kNamedBarriers];
  std::vector<std::map<unsigned, LaneExchange>> warps;
  std::vector<unsigned> alive_lanes;  // Alive lanes of each warp.
  // Programmatic dependent launch.
  bool has_waited = false;
  bool triggers_before_wait = false;
};

// The fields of an mbarrier, in its 64 bits.
struct PhaseBarrier {
  int16_t count;
  int16_t pending;
  int32_t bytes_and_phase;  // Twice the bytes that are missing, plus the phase's parity.

  [[nodiscard]] uint32_t phase() const { return static_cast<uint32_t>(bytes_and_phase) & 1U; }
  [[nodiscard]] int32_t bytes() const { return bytes_and_phase >> 1; }
};
static_assert(sizeof(PhaseBarrier) == 8);

struct Machine {
  SwitchPoint scheduler;
  Fiber* current = nullptr;
  std::vector<std::unique_ptr<Block>> blocks;  // CTAs that run: a cluster, or a cooperative grid.
  std::deque<Cluster> clusters;
  std::vector<Fiber> fibers;
  std::vector<void*> stacks;
  size_t shared_bytes = 0;
  const std::function<void()>* body = nullptr;
  std::vector<std::function<void()>> copies;  // To barriers, in no order.
  bool is_late = false;
  bool is_programmatic = false;  // The launch.
  uint64_t round = 0;            // Steps of all threads.
  std::mt19937 random;
  std::string failure;
};

Machine& machine();
Fiber& current();

// Ends the kernel.
[[noreturn]] void fail(const std::string& what);

PhaseBarrier load_barrier(const uint8_t* at);
void change_barrier(uint8_t* at, int arrivals, int32_t bytes);

bool is_ready(const Wait& wait);
void wait_until(const Wait& wait);
// Lets others go on, before something that took its time on a GPU.
void pause();

void arrive_at(Barrier& barrier, int expected);
void finish_exchange(LaneExchange& exchange, unsigned mask, unsigned alive);

}  // namespace emulator
