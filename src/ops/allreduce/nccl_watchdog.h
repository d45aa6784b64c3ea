// The deadline of NCCL's kernels. NCCL itself waits for a peer without end; what a rank has queued
// is known to the GPU alone, since graphs are replayed without the host.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "comm/allreduce_args.h"
#include "runtime/cuda/nccl.h"
#include "runtime/cuda/side_stream.h"

namespace narrowfloat {

// Aborts a communicator whose kernels make no progress: one call has `deadline` from begin() to
// end(). 0: as long as it likes. NCCL's kernels then end at once, and every later call throws.
// Graphs that hold calls of the communicator must not be replayed afterwards.
class NcclWatchdog {
 public:
  NcclWatchdog(NcclCommunicator& nccl, Device device, std::chrono::milliseconds deadline);
  NcclWatchdog(const NcclWatchdog&) = delete;
  NcclWatchdog& operator=(const NcclWatchdog&) = delete;
  ~NcclWatchdog();

  // Queued before the first operation of a call, and after its last one; can be captured. What
  // end() returns, nothing without a deadline, is for the kernel that comes next.
  void begin(Stream stream) const;
  [[nodiscard]] EndOfExchange end(Stream stream) const;

 private:
  [[nodiscard]] CallProgress& progress() const;
  void watch();

  NcclCommunicator& nccl_;
  Device device_;
  std::chrono::milliseconds deadline_;
  // A call's begin is told beside its operations: between them, it would cost each call some time.
  std::optional<SideStream> beside_;
  std::shared_ptr<uint8_t> progress_;  // CallProgress, in memory of the host.
  std::shared_ptr<uint8_t> ended_;     // uint32_t, on the device.
  std::mutex mutex_;
  std::condition_variable stop_;
  bool is_stopping_ = false;
  std::thread thread_;
};

}  // namespace narrowfloat
