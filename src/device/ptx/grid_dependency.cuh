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

// griddepcontrol.launch_dependents: triggers the next launch, whose CTAs are scheduled once every
// CTA of this grid has triggered it or ended. It is a matter of speed only: the next kernel waits
// for the whole of this one. Best after the loads of this CTA are issued; at the very top the
// waiting CTAs take slots that this grid still needs. A CTA has waited for the grids before it when
// it triggers: that is what runtime/cuda/kernel_chain.h counts on.
__device__ inline void allow_next_grid() { asm volatile("griddepcontrol.launch_dependents;"); }

// The same before this CTA has waited, for kernels after which nobody reads memory early. Right
// where no CTA of this grid waits for a place and the next kernel has work to do before its wait.
__device__ inline void allow_next_grid_before_wait() {
  asm volatile("griddepcontrol.launch_dependents;");
}

}  // namespace narrowfloat
