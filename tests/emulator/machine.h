// A GPU on the CPU, for tests of kernels: the threads of a CTA, or of a cluster of CTAs, are
// fibers of one thread of the host, and what runs beside a thread on a GPU (copies, warpgroup
// matrix multiplications) is a list of things to be done. Functions here are what the instructions
// of src/device/ptx do; the headers of tests/emulator/replaced call them under their names.
//
// A kernel must not depend on when such a thing is done, nor on which thread goes first. So the
// order of threads is random, copies are done at a random time up to the wait for them, and stores
// and multiplications in that wait; or everything in order and at once, which is what 0 and no
// NARROWFLOAT_EMULATOR_SEED mean. A kernel in which no thread can go on is an error that says what
// each waits for.
//
// Not emulated: time, races between two accesses without a wait between them that happen to come
// in the right order, proxies and their fences, the rounding of wgmma's sums, changes to wgmma's
// operands in registers while it runs, groups of stores, CTAs of a grid that wait for each other
// without a cluster, unless the launch is cooperative. Static shared memory is not noise at the
// start, as dynamic is: it holds what the previous CTA has left.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>
#include <functional>

namespace emulator {

// --- Threads and CTAs ----------------------------------------------------------------------------

// `body` calls the kernel, whose address is `kernel`.
cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel,
                   std::function<void()> body);

int lane();
int warp();  // Number of the warp in its CTA.

void sync_block();
int sync_block_or(int predicate);
void sync_named(int id, int threads);

struct LaneValues {
  uint64_t bits[32];
  unsigned present;  // Lanes that take part.
};
// Waits for the lanes of `mask`, and tells each what all have given.
const LaneValues& exchange_lanes(unsigned mask, uint64_t bits);

uint32_t cluster_rank();
uint32_t cluster_size();
void arrive_at_cluster();
void wait_for_cluster();

// --- Programmatic dependent launch ---------------------------------------------------------------

// Fails the kernel if a CTA triggers the next launch, or in a programmatic launch ends, before it
// has waited for the previous grids, unless it triggers by the last of these.
void wait_for_grids();
void trigger_launch();
void trigger_launch_before_wait();

// --- Shared memory by addresses from 0 on --------------------------------------------------------

uint8_t* dynamic_shared();  // Aligned to 1024.
uint32_t shared_address(const void* pointer);
// `bytes` at an address of this CTA, or of CTA `rank` of its cluster; within what was asked
// for.
uint8_t* shared_memory(uint32_t address, uint32_t bytes);
uint8_t* shared_memory_of(uint32_t rank, uint32_t address, uint32_t bytes);

// --- Barriers in shared memory (mbarrier) --------------------------------------------------------

void init_barrier(uint32_t barrier, uint32_t arrivals);
void arrive(uint32_t rank, uint32_t barrier);
void arrive_and_expect(uint32_t barrier, uint32_t bytes);
void wait_for_phase(uint32_t barrier, uint32_t parity);

// --- What runs beside a thread -------------------------------------------------------------------

// A copy of this thread that only its own later arrive_after_copies() and wait_for_copies() follow.
void copy_async(std::function<void()> copy);
void arrive_after_copies(uint32_t barrier);
void wait_for_copies();
// Copies since the last end are a group; the wait is for all groups but the newest.
void end_copy_group();
void wait_for_copy_groups(int newest);

// A copy that ends with `bytes` on the barrier at `barrier` of the CTAs of `ranks`.
void copy_to_barrier(std::function<void()> copy, uint16_t ranks, uint32_t barrier, uint32_t bytes);
uint16_t own_rank();  // As a mask.

// A store of this thread, done when it waits for its stores, or ends.
void store_async(std::function<void()> store);
void wait_for_stores();

// A relaxed store that other CTAs see, done at a random time up to this thread's next fence, in the
// thread's order.
void store_relaxed(std::function<void()> store);
void fence();
// Before each load of memory that another CTA may change: a thread that polls lets others go on.
void spin();
uint64_t time_ns();

// A warpgroup's instruction: `multiply` makes the sums of this thread, `count` at `sums`, which are
// NaN from now on until it is done.
void multiply_async(float* sums, int count, std::function<void()> multiply);
void commit_multiplications();
void wait_for_multiplications(int but);

// --- Plain functions -----------------------------------------------------------------------------

// Ends the kernel with `what` unless it holds.
void require(bool holds, const char* what);
inline bool is_aligned(const void* pointer, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}
uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector);

}  // namespace emulator
