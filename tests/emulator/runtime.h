// The interface between the emulated runtime (runtime.cpp) and the machine.
#pragma once

#include <cuda_runtime.h>
#include <functional>

namespace emulator {

// The most shared memory that a CTA may ask for.
int shared_bytes_limit();
// A CTA of a kernel may ask for what the kernel has opted in to, else for 48 KB.
size_t shared_bytes_of(const void* kernel);
cudaError_t refuse_launch();

// Does something in stream order: at once, or on each replay of a graph that is being captured.
cudaError_t queue(cudaStream_t stream, std::function<cudaError_t()> work);

// From here on every call fails, as after an illegal access.
cudaError_t fail_device();

}  // namespace emulator
