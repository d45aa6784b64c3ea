// See nccl_watchdog.h.
#include "ops/allreduce/nccl_watchdog.h"

#include <algorithm>
#include <atomic>

#include "base/throw_error.h"
#include "ops/allreduce/allreduce_sm90.h"
#include "runtime/cuda/device_memory.h"

namespace narrowfloat {

NcclWatchdog::NcclWatchdog(NcclCommunicator& nccl, Device device,
                           std::chrono::milliseconds deadline)
    : nccl_(nccl), device_(device), deadline_(deadline) {
  if (deadline.count() == 0) return;
  beside_.emplace(device);
  progress_ = allocate_mapped_memory(device, sizeof(CallProgress));
  ended_ = allocate_device_memory(device, sizeof(uint32_t));
  fill_words(ended_.get(), 1, 0, device, {});
  wait_for_device(device);
  thread_ = std::thread([this] { watch(); });
}

NcclWatchdog::~NcclWatchdog() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  stop_.notify_all();
  if (thread_.joinable()) thread_.join();
}

CallProgress& NcclWatchdog::progress() const {
  return *reinterpret_cast<CallProgress*>(progress_.get());
}

void NcclWatchdog::begin(Stream stream) const {
  if (beside_) fill_words(&progress().is_running, 1, 1, device_, beside_->fork(stream));
}

EndOfExchange NcclWatchdog::end(Stream stream) const {
  if (!beside_) return {};
  beside_->join(stream);
  return {.ended = reinterpret_cast<uint32_t*>(ended_.get()), .progress = &progress()};
}

void NcclWatchdog::watch() {
  constexpr std::chrono::milliseconds kLongestPause{100};
  const auto pause = std::clamp<std::chrono::milliseconds>(
      deadline_ / 16, std::chrono::milliseconds(1), kLongestPause);
  const auto load = [](uint32_t& word) {
    return std::atomic_ref(word).load(std::memory_order_acquire);
  };
  uint32_t last_ended = 0;
  auto changed = std::chrono::steady_clock::now();
  std::unique_lock lock(mutex_);
  while (!stop_.wait_for(lock, pause, [this] { return is_stopping_; })) {
    const bool is_running = load(progress().is_running) != 0;
    const uint32_t ended = load(progress().ended);
    const auto now = std::chrono::steady_clock::now();
    if (!is_running || ended != last_ended) {
      last_ended = ended;
      changed = now;
    } else if (now - changed > deadline_) {
      nccl_.abort(
          fmt::format("call {} over NCCL on {} did not end within {} ms: a peer is late or dead",
                      ended, to_string(device_), deadline_.count()));
      return;
    }
  }
}

}  // namespace narrowfloat
