// Independent pieces of work on the threads that the library may use (--threads). The library's own
// loops are not public; what a command computes itself runs here.
#pragma once

#include <cstdint>
#include <functional>

namespace narrowfloat::cli {

// Calls body(i) once for every i in [0, count), in any order and from several threads. The first
// exception reaches the caller, after all threads have ended.
void for_each_index(int64_t count, const std::function<void(int64_t)>& body);

}  // namespace narrowfloat::cli
