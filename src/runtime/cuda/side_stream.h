// Work beside a stream: it starts where the stream stands, and the stream waits for it later. Host
// code only.
#pragma once

#include "narrowfloat/tensor.h"

// CUDA's types, as cuda_runtime_api.h declares them.
struct CUstream_st;
struct CUevent_st;

namespace narrowfloat {

// Forks and joins can be captured into graphs, where the work becomes a branch of its own. One
// thread at a time.
class SideStream {
 public:
  // Throws kDevice.
  explicit SideStream(Device device);
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;
  ~SideStream();

  // Returns a stream whose work runs after all that is on `stream` now. Throws kDevice.
  [[nodiscard]] Stream fork(Stream stream) const;
  // Makes later work of `stream` wait for all that is on the result of fork(), which was called
  // with the same stream. Throws kDevice.
  void join(Stream stream) const;

 private:
  Device device_;
  CUstream_st* side_ = nullptr;
  CUevent_st* forked_ = nullptr;
  CUevent_st* joined_ = nullptr;
};

}  // namespace narrowfloat
