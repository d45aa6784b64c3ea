// What the emulated runtime (runtime.cpp) and the machine ask of each other.
#pragma once

#include <cuda_runtime.h>
#include <functional>

namespace emulator {

inline constexpr int kSharedBytes = 227 * 1024;  // That a block may ask for.
// That blocks of a kernel may: what it has opted in to, else 48 KB.
size_t shared_bytes_of(const void* kernel);
cudaError_t refuse_launch();

// Does something in stream order: at once, or on each replay of a graph that is being captured.
cudaError_t queue(cudaStream_t stream, std::function<cudaError_t()> work);

// From here on every call fails, as after an illegal access.
cudaError_t fail_device();

}  // namespace emulator
