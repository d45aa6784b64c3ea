// Extents of the library are signed, those of standard containers are not.
#pragma once

#include <cstddef>
#include <cstdint>

namespace narrowfloat {

inline size_t to_index(int64_t i) { return static_cast<size_t>(i); }

}  // namespace narrowfloat
