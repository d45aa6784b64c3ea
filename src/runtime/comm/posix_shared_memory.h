// Symmetric memory of the processes of one host, on the CPU: POSIX shared memory.
#pragma once

#include <cstdint>
#include <memory>

#include "narrowfloat/bootstrap.h"
#include "runtime/comm/symmetric_memory.h"

namespace narrowfloat {

// Collective. Each rank makes an object with a random name that only its user can open. The objects
// have no names any more when the function returns or throws. Throws PhaseError on all ranks.
std::unique_ptr<SymmetricMemory> make_posix_shared_memory(Bootstrap& bootstrap, Device device,
                                                          int64_t size_bytes);

}  // namespace narrowfloat
