// Programmatic dependent launch: a kernel may start while the one before it still runs. Both
// instructions do nothing in a kernel that was launched without the attribute.
#pragma once

#include "base/host_device.h"

namespace narrowfloat {

// griddepcontrol.wait (PTX ISA, Parallel Synchronization): until all memory operations of the grids
// this one depends on are done and visible. Before the first access to memory that an earlier
// kernel may read or write.
__device__ inline void wait_for_previous_grids() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// griddepcontrol.launch_dependents: lets the next kernel's blocks be scheduled once every block of
// this grid has said so or ended. A matter of speed only: the next kernel waits for the whole of
// this one. Best after this block's loads are issued; at the very top the waiting blocks take slots
// that this grid still needs. The top is right where no block of this grid waits for a place and
// there is work in front of the next one's wait.
__device__ inline void allow_next_grid() { asm volatile("griddepcontrol.launch_dependents;"); }

}  // namespace narrowfloat
