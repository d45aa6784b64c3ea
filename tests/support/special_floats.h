// Many tests write out these values of float.
#pragma once

#include <limits>

namespace narrowfloat {

inline constexpr float kFloatInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kFloatNan = std::numeric_limits<float>::quiet_NaN();

}  // namespace narrowfloat
