// Symmetric memory of processes on GPUs of one host: CUDA IPC and CUDA's virtual memory management
// (VMM). Ranks may share a GPU. It needs no CUDA header.
#pragma once

#include <cstdint>
#include <memory>

#include "narrowfloat/bootstrap.h"
#include "runtime/comm/symmetric_memory.h"

namespace narrowfloat {

// Both are collective and throw PhaseError on all ranks where one fails, with nothing left
// allocated.

// cudaMalloc, and handles that cudaIpcOpenMemHandle opens. Ranks are processes.
std::unique_ptr<SymmetricMemory> make_cuda_ipc_memory(Bootstrap& bootstrap, Device device,
                                                      int64_t size_bytes);

// Physical memory that is exported as a file descriptor, and mapped by each rank.
std::unique_ptr<SymmetricMemory> make_cuda_vmm_memory(Bootstrap& bootstrap, Device device,
                                                      int64_t size_bytes);

}  // namespace narrowfloat
