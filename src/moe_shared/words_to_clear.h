// Words on the device that a kernel sets to 0 beside its own work, for a later kernel of the same
// run that counts with them: a launch less than clearing them apart.
#pragma once

#include <cstdint>

namespace narrowfloat {

struct WordsToClear {
  uint32_t* words = nullptr;
  uint32_t count = 0;  // Up to 32.
};

}  // namespace narrowfloat
