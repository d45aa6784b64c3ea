// Tests of layouts call them by these short names.
#pragma once

#include "narrowfloat/format.h"

namespace narrowfloat {

inline constexpr auto kLinear = ScaleLayoutId::kLinear;
inline constexpr auto k128x4 = ScaleLayoutId::kSwizzled128x4;
inline constexpr auto k8x4 = ScaleLayoutId::kSwizzled8x4;
inline constexpr auto kMnMajor = ScaleLayoutId::kMnMajor;

}  // namespace narrowfloat
