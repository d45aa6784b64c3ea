// Streams, captured graphs and devices for GPU tests. The header needs no CUDA: only the .cu file
// beside it includes CUDA's headers.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "narrowfloat/tensor.h"

namespace narrowfloat::testing {

// Empty where kernels of this build run on cuda:`index`; else a whole sentence that says why not.
std::string gpu_missing(int index = 0);

inline Device gpu(int index = 0) { return {DeviceType::kCuda, index}; }

// Whether cuda:`index` runs code for exactly its architecture, not the portable code.
bool gpu_has_own_code(int index = 0);
// The implementation of an idea that runs there: "sm90_rows" or "sm80_rows" for "rows".
std::string gpu_implementation(std::string_view idea, int index = 0);

// A stream of its own, not ordered with the default stream.
class CudaStream {
 public:
  explicit CudaStream(Device device = gpu());
  ~CudaStream();
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  [[nodiscard]] Stream get(bool programmatic_launch = false) const {
    return {.handle = handle_, .programmatic_launch = programmatic_launch};
  }
  // Until everything that was queued is done. Throws what a kernel ran into.
  void synchronize() const;

 private:
  Device device_;
  void* handle_ = nullptr;
};

// The work that `body` queues on `stream`, as a graph. Throws where the body does something that a
// capture forbids: allocating or waiting.
class CapturedGraph {
 public:
  CapturedGraph(const CudaStream& stream, const std::function<void()>& body);
  ~CapturedGraph();
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;

  // Runs it `times` in a row and waits.
  void replay(int times = 1) const;
  [[nodiscard]] int64_t num_nodes() const { return num_nodes_; }
  // Nodes that are neither kernels nor memsets: allocations, copies, calls of the host.
  [[nodiscard]] int64_t num_other_nodes() const { return num_other_nodes_; }

 private:
  const CudaStream& stream_;
  void* graph_ = nullptr;
  void* executable_ = nullptr;
  int64_t num_nodes_ = 0;
  int64_t num_other_nodes_ = 0;
};

// Until all work of the device is done.
void synchronize_device(Device device = gpu());
int64_t free_device_memory(Device device = gpu());
// The current device of this thread.
int current_device();
// Whether a call of CUDA that failed would show up in the caller's next check of launches.
bool has_cuda_error();

}  // namespace narrowfloat::testing
