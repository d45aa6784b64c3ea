// Memory that all ranks of a group can reach: one region of the same size on each rank, mapped in
// every process (docs/allreduce.md, Launchers). NVLink multicast is never used.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "narrowfloat/allreduce.h"
#include "narrowfloat/bootstrap.h"

namespace narrowfloat {

class SymmetricMemory {
 public:
  // Ranks of a workspace.
  static constexpr int kMaxRanks = kMostAllReduceRanks;

  SymmetricMemory(const SymmetricMemory&) = delete;
  SymmetricMemory& operator=(const SymmetricMemory&) = delete;
  // Unmaps and frees; waits for no other rank. On a GPU it waits for the device, since memory must
  // not be unmapped under a kernel.
  virtual ~SymmetricMemory() = default;

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int ranks() const { return static_cast<int>(regions_.size()); }
  [[nodiscard]] Device device() const { return device_; }
  [[nodiscard]] AllReduceTransport transport() const { return transport_; }
  [[nodiscard]] int64_t size_bytes() const { return size_bytes_; }
  // The region of a rank as this process sees it, aligned to 128 bytes at least.
  [[nodiscard]] uint8_t* region(int rank) const { return regions_[static_cast<size_t>(rank)]; }
  [[nodiscard]] uint8_t* own() const { return region(rank_); }

  // Unmaps the regions of the peers, whose addresses are null from then on. CUDA leaves undefined
  // what happens where memory is freed that another process still has open (CUDA IPC): an orderly
  // end is a barrier, unmap_peers() on all ranks, a barrier, the destructor.
  virtual void unmap_peers() = 0;

 protected:
  SymmetricMemory(int rank, Device device, AllReduceTransport transport, int64_t size_bytes)
      : rank_(rank), device_(device), transport_(transport), size_bytes_(size_bytes) {}
  void set_regions(std::vector<uint8_t*> regions) { regions_ = std::move(regions); }
  void forget_peers() {
    for (int peer = 0; peer < ranks(); ++peer) {
      if (peer != rank_) regions_[static_cast<size_t>(peer)] = nullptr;
    }
  }

 private:
  int rank_;
  Device device_;
  AllReduceTransport transport_;
  int64_t size_bytes_;
  std::vector<uint8_t*> regions_;
};

// Throws kInvalidArgument for ranks outside 1 to 8 and sizes outside 1 to 2^62.
void check_region_size(int ranks, int64_t size_bytes);

// Collective. Allocates, exchanges and maps the regions, then probes them: each rank writes a
// pattern into every peer's region and reads it back. Contents are undefined afterwards. Every
// phase ends with an agreement, so all ranks throw if one fails. kAuto: shared memory on the CPU;
// on GPUs the first of CUDA VMM and CUDA IPC whose probe succeeds on all ranks. A transport that
// fails, also for want of memory, throws kUnsupported with the reason of each rank. Throws
// kInvalidArgument for arguments that differ between ranks and for kThreads, kVirtual and kNone.
std::unique_ptr<SymmetricMemory> make_symmetric_memory(Bootstrap& bootstrap, Device device,
                                                       AllReduceTransport transport,
                                                       int64_t size_bytes);

// The regions of `ranks` ranks in one allocation of this process: threads on the CPU, virtual ranks
// on a GPU. The allocation lives as long as any of them. Throws as check_region_size(), and kIo
// (CPU) or kDevice where there is not enough memory.
std::vector<std::unique_ptr<SymmetricMemory>> make_local_memory(int ranks, Device device,
                                                                int64_t size_bytes);

}  // namespace narrowfloat
