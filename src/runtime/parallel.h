// Parallel loops over all cores (oneTBB); each task runs in the specified floating-point
// environment. Work is split by index, so results cannot depend on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/function_ref.h"

namespace narrowfloat {

// Calls body(begin, end) on disjoint ranges that cover [0, count), of at least `grain` where
// possible. Exceptions reach the caller.
void parallel_for(int64_t count, int64_t grain, FunctionRef<void(int64_t, int64_t)> body);

// Rows of `cols` elements that together have about `elements`, at least one: a grain for
// parallel_for().
inline int64_t row_grain(int64_t elements, int64_t cols) {
  return std::max<int64_t>(1, elements / std::max<int64_t>(1, cols));
}

// The largest of body(begin, end) over such ranges, as the bit pattern of a non-negative float
// (whose order is that of integers, so the result does not depend on the split); 0 for count == 0.
uint32_t parallel_max(int64_t count, int64_t grain, FunctionRef<uint32_t(int64_t, int64_t)> body);

}  // namespace narrowfloat
