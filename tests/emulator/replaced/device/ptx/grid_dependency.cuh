// Emulated: src/device/ptx/grid_dependency.cuh. One kernel runs at a time; a CTA that triggers the
// next launch before it has waited, without saying so, fails.
#pragma once

#include "emulator/machine.h"

namespace narrowfloat {

inline void wait_for_previous_grids() { ::emulator::wait_for_grids(); }
inline void trigger_dependent_launch() { ::emulator::trigger_launch(); }
inline void trigger_dependent_launch_before_wait() { ::emulator::trigger_launch_before_wait(); }

}  // namespace narrowfloat
