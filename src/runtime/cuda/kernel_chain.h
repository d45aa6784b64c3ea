// Which memory a kernel may read before it waits on its programmatic dependency, under programmatic
// dependent launch inside a layer.
//
// A kernel starts when every CTA of the preceding kernel has triggered the launch or exited. If no
// CTA triggers before its own wait (griddepcontrol.wait), all kernels before that preceding one are
// complete by then:
//
//   writer       ...........................|          complete: its whole grid has ended
//   kernel       ....[wait]--- trigger ---|            waits for the writer, then triggers
//   next kernel            [early reads][wait]----|    starts after that trigger
//
// A kernel may therefore read memory early if the kernel that wrote it is two kernels earlier, but
// not if it is the preceding one. A kernel that triggers before its wait, as combine does and
// quantizers of whole rows do, completes nothing for its successors. The emulator of kernels fails
// a CTA that triggers before its wait without saying so, or ends without a wait
// (device/ptx/grid_dependency.cuh). It runs kernels one after another, so it does not see what a
// kernel reads before its wait.
#pragma once

#include <cstdint>

namespace narrowfloat {

// A set of memory, one bit per buffer; the caller numbers the buffers.
class KernelChain {
 public:
  enum class Trigger : int { kAfterWait = 0, kBeforeWait = 1 };

  // Appends the next kernels of the chain, one or more, which write `memory`.
  constexpr void append(uint32_t memory, Trigger trigger = Trigger::kAfterWait) {
    if (trigger == Trigger::kAfterWait) {
      complete_ |= pending_;
      pending_ = 0;
    }
    pending_ |= memory;
    complete_ &= ~memory;
  }

  // Whether the next kernel may read all of `memory`, which kernels of this chain wrote, before its
  // wait.
  [[nodiscard]] constexpr bool is_complete(uint32_t memory) const {
    return (memory & ~complete_) == 0;
  }

 private:
  uint32_t pending_ = 0;   // Written by kernels that may still run when the next one starts.
  uint32_t complete_ = 0;  // Written, and complete when the next one starts.
};

}  // namespace narrowfloat
