// Device words that a kernel sets to 0 beside its own work, as counters of a later kernel of the
// same run. This saves the launch of a memset.
#pragma once

#include <cstdint>

namespace narrowfloat {

struct WordsToClear {
  uint32_t* words = nullptr;
  uint32_t count = 0;  // Up to 32.
};

}  // namespace narrowfloat
