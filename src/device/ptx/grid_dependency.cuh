// Programmatic dependent launch: a kernel may start while the preceding one still runs. Both
// instructions do nothing in a kernel that was launched without the attribute. Portable code has
// neither, and is never launched with it (runtime/cuda/launch.h).
#pragma once

#include "base/host_device.h"

namespace narrowfloat {

// griddepcontrol.wait (PTX ISA, Parallel Synchronization): waits until all memory operations of the
// prerequisite grids are complete and visible. Call it before the first access to memory that an
// earlier kernel may read or write.
__device__ inline void wait_for_previous_grids() {
  if constexpr (kHasHopperInstructions) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// griddepcontrol.launch_dependents: triggers the next launch, whose CTAs are scheduled once every
// CTA of this grid has triggered it or exited. It affects speed only: the next kernel still waits
// for the whole of this one. The best place is after the loads of this CTA are issued; at the very
// top the waiting CTAs would take SM slots that this grid still needs. A CTA waits on the
// programmatic dependency before it triggers: runtime/cuda/kernel_chain.h relies on that.
__device__ inline void trigger_dependent_launch() {
  if constexpr (kHasHopperInstructions) asm volatile("griddepcontrol.launch_dependents;");
}

// Triggers the next launch before this CTA has waited, for kernels whose successors read early
// only what runtime/cuda/kernel_chain.h lets them. It pays where no CTA of this grid waits for a
// slot and the next kernel has work before its wait.
__device__ inline void trigger_dependent_launch_before_wait() {
  if constexpr (kHasHopperInstructions) asm volatile("griddepcontrol.launch_dependents;");
}

}  // namespace narrowfloat
