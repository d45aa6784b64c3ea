// Whether the ranks really reach each other's memory: they write patterns and read them back. A
// transport may report success and yet deliver nothing, for example peer access through an IOMMU
// that translates it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "narrowfloat/bootstrap.h"
#include "runtime/comm/symmetric_memory.h"

namespace narrowfloat {

// Copies between regions and the memory of this process. Each copy is complete on return.
class RegionAccess {
 public:
  virtual ~RegionAccess() = default;
  virtual void write(uint8_t* region, const void* from, size_t size_bytes) = 0;
  virtual void read(void* to, const uint8_t* region, size_t size_bytes) = 0;
};

// Bytes to map for regions of `size_bytes` in units of `granularity`: room for the cells that the
// probe needs at both ends.
int64_t mapped_bytes(int64_t size_bytes, int64_t granularity);

// Collective. Each rank writes its cells at the start and the end of every region, then reads those
// of all ranks in its own region, and its own ones in all regions. Throws PhaseError with the ranks
// between which a pattern has not arrived. `mapped_bytes` is the same on all ranks.
void probe_regions(Bootstrap& bootstrap, const SymmetricMemory& memory, int64_t mapped_bytes,
                   RegionAccess& access);

}  // namespace narrowfloat
