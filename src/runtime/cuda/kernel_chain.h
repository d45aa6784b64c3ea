// Which memory a kernel may read before it waits for the kernels before it, under programmatic
// dependent launch inside a layer.
//
// A kernel starts when every CTA of the kernel before it has triggered the launch or ended. Where
// no CTA does so before its own wait (griddepcontrol.wait), all kernels before that one are
// complete by then:
//
//   writer       ...........................|          complete: its whole grid has ended
//   kernel       ....[wait]--- trigger ---|            waits for the writer, then triggers
//   next kernel            [early reads][wait]----|    starts after that trigger
//
// So memory may be read early two kernels after the one that wrote it, and not in the next one. A
// kernel that triggers before its wait (the combine does, as nothing after it in a layer reads
// early) moves nothing on. The emulator of kernels fails a kernel that breaks this rule without
// saying so (device/ptx/grid_dependency.cuh).
#pragma once

#include <cstdint>

namespace narrowfloat {

// Memory as bits of a set, whatever the caller numbers it by.
class KernelChain {
 public:
  enum class Trigger : int { kAfterWait = 0, kBeforeWait = 1 };

  // The next kernels of the chain, one or more, which write `memory`.
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
