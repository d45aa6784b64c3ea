// See nccl.h.
#include "runtime/cuda/nccl.h"

#include <algorithm>
#include <mutex>
#include <string>
#include <thread>

#include "base/assert.h"
#include "base/throw_error.h"
#include "runtime/comm/phase.h"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/device_memory.h"
#include "runtime/cuda/launch.h"
#include "runtime/cuda/nccl_library.h"

namespace narrowfloat {
namespace {

using NcclClock = std::chrono::steady_clock;

nccl::DataType nccl_type_of(DType element) {
  switch (element) {
    case DType::kF16:
      return nccl::kFloat16;
    case DType::kBF16:
      return nccl::kBfloat16;
    case DType::kF32:
      return nccl::kFloat32;
    default:
      throw_invalid("element: NCCL sums F16, BF16 and F32, got {}", name(element));
  }
}

// Makes the context of the device, so that a rank without one says so before others wait for it.
void initialize_device(Device device) {
  cuda_device(device.index);  // Throws for a device that is not there.
  const CudaDeviceScope scope(device);
  check_cuda(cudaFree(nullptr), "cudaFree(nullptr)");
}

}  // namespace

class NcclCommunicator::Impl {
 public:
  Impl(const NcclLibrary& library, int rank, int ranks, Device device,
       std::chrono::milliseconds deadline)
      : nccl_(library.functions),
        rank_(rank),
        ranks_(ranks),
        device_(device),
        deadline_(deadline) {}
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl() {
    if (comm_ == nullptr) return;
    try {
      finish(nccl_.CommFinalize(comm_), "ncclCommFinalize", deadline_);
      nccl_.CommDestroy(comm_);
    } catch (const Error&) {  // The communicator is aborted.
    }
  }

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int ranks() const { return ranks_; }
  [[nodiscard]] Device device() const { return device_; }

  void init(const nccl::UniqueId& id, std::chrono::milliseconds deadline) {
    const std::lock_guard lock(mutex_);
    const CudaDeviceScope scope(device_);
    nccl::Config config;
    finish(nccl_.CommInitRankConfig(&comm_, ranks_, id, rank_, &config), "ncclCommInitRankConfig",
           deadline);
  }

  // Queues what `enqueue(functions, communicator)` does, and waits until NCCL has queued it.
  template <typename Enqueue>
  void call(const char* name, Enqueue enqueue) {
    const std::lock_guard lock(mutex_);
    refuse_if_aborted();
    const CudaDeviceScope scope(device_);
    finish(enqueue(nccl_, comm_), name, deadline_);
  }

  void check() {
    const std::lock_guard lock(mutex_);
    refuse_if_aborted();
    nccl::Result state = nccl::kSuccess;
    const nccl::Result result = nccl_.CommGetAsyncError(comm_, &state);
    if (result != nccl::kSuccess) fail("ncclCommGetAsyncError", result);
    if (state != nccl::kSuccess && state != nccl::kInProgress) fail("a queued call", state);
  }

  void abort(const std::string& reason) {
    const std::lock_guard lock(mutex_);
    if (comm_ != nullptr) end_with(reason);
  }

 private:
  void end_with(const std::string& reason) {
    failure_ = reason;
    if (comm_ != nullptr) nccl_.CommAbort(comm_);
    comm_ = nullptr;
  }

  void refuse_if_aborted() const {
    if (comm_ != nullptr) return;
    throw_error(ErrorKind::kDevice, "NCCL on {}: the communicator was aborted after: {}",
                to_string(device_), failure_);
  }

  // Waits while NCCL works on a call in the background.
  void finish(nccl::Result result, const char* name, std::chrono::milliseconds deadline) {
    const NcclClock::time_point end = NcclClock::now() + deadline;
    while (result == nccl::kInProgress) {
      if (NcclClock::now() > end) {
        give_up(
            fmt::format("{} on {}, rank {} of {}: not done after {} ms: a peer is missing or "
                        "dead",
                        name, to_string(device_), rank_, ranks_, deadline.count()));
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
      nccl::Result state = nccl::kSuccess;
      result = nccl_.CommGetAsyncError(comm_, &state);
      if (result == nccl::kSuccess) result = state;
    }
    if (result != nccl::kSuccess) fail(name, result);
  }

  [[noreturn]] void fail(const char* name, nccl::Result result) {
    const char* detail = nccl_.GetLastError(comm_);
    give_up(fmt::format("{} on {}, rank {} of {}: {} ({}); NCCL_DEBUG=INFO shows more", name,
                        to_string(device_), rank_, ranks_, nccl_.GetErrorString(result),
                        detail == nullptr ? "" : detail));
  }

  [[noreturn]] void give_up(const std::string& message) {
    end_with(message);
    throw Error(ErrorKind::kDevice, message);
  }

  const nccl::Functions& nccl_;
  int rank_;
  int ranks_;
  Device device_;
  std::chrono::milliseconds deadline_;
  std::mutex mutex_;           // It guards what follows.
  nccl::Comm comm_ = nullptr;  // Null: not made, or aborted.
  std::string failure_;
};

NcclCommunicator::NcclCommunicator(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
NcclCommunicator::~NcclCommunicator() = default;

std::unique_ptr<NcclCommunicator> NcclCommunicator::create(Bootstrap& bootstrap, Device device,
                                                           std::chrono::milliseconds deadline) {
  const NcclLibrary* library = nullptr;
  run_phase(bootstrap, "loading NCCL", [&] {
    library = &nccl_library();
    initialize_device(device);
  });
  bootstrap.require_equal("the version of NCCL", library->version);
  nccl::UniqueId id{};
  run_phase(bootstrap, "making the id of NCCL's communicator", [&] {
    if (bootstrap.rank() != 0) return;
    const nccl::Result result = library->functions.GetUniqueId(&id);
    if (result == nccl::kSuccess) return;
    throw_error(ErrorKind::kDevice, "ncclGetUniqueId: {}",
                library->functions.GetErrorString(result));
  });
  bootstrap.broadcast(std::as_writable_bytes(std::span(&id, 1)), 0);
  auto impl =
      std::make_unique<Impl>(*library, bootstrap.rank(), bootstrap.size(), device, deadline);
  // A rank that waits for a missing one gives up before the others give up on it.
  const auto patience = std::min<std::chrono::milliseconds>(deadline, bootstrap.deadline() / 2);
  try {
    run_phase(bootstrap, "making NCCL's communicator", [&] { impl->init(id, patience); });
  } catch (const PhaseError&) {
    impl->abort("another rank failed");  // Other ranks are not there to finalize it.
    throw;
  }
  return std::unique_ptr<NcclCommunicator>(new NcclCommunicator(std::move(impl)));
}

void NcclCommunicator::all_reduce(const void* input, void* output, int64_t count, DType element,
                                  Stream stream) {
  const nccl::DataType type = nccl_type_of(element);
  impl_->call("ncclAllReduce", [&](const nccl::Functions& nccl, nccl::Comm comm) {
    return nccl.AllReduce(input, output, static_cast<size_t>(count), type, nccl::kSum, comm,
                          cuda_stream(stream));
  });
}

void NcclCommunicator::exchange(const void* input, std::span<const Part> sends, void* output,
                                std::span<const Part> receives, Stream stream) {
  const auto ranks = static_cast<size_t>(impl_->ranks());
  NF_ASSERT(sends.size() == ranks && receives.size() == ranks);
  const auto own = static_cast<size_t>(impl_->rank());
  NF_ASSERT(sends[own].size_bytes == receives[own].size_bytes);
  const auto* from = static_cast<const uint8_t*>(input);
  auto* to = static_cast<uint8_t*>(output);
  impl_->call(
      "an exchange by ncclSend and ncclRecv", [&](const nccl::Functions& nccl, nccl::Comm comm) {
        nccl::Result first_error = nccl.GroupStart();
        const auto note = [&](nccl::Result result) {
          const bool is_fine = result == nccl::kSuccess || result == nccl::kInProgress;
          if (!is_fine && first_error == nccl::kSuccess) first_error = result;
        };
        for (size_t i = 0; i < ranks; ++i) {
          const auto peer = static_cast<int>(i);
          if (i != own && sends[i].size_bytes > 0) {
            note(nccl.Send(from + sends[i].offset, static_cast<size_t>(sends[i].size_bytes),
                           nccl::kUint8, peer, comm, cuda_stream(stream)));
          }
          if (i != own && receives[i].size_bytes > 0) {
            note(nccl.Recv(to + receives[i].offset, static_cast<size_t>(receives[i].size_bytes),
                           nccl::kUint8, peer, comm, cuda_stream(stream)));
          }
        }
        const nccl::Result end = nccl.GroupEnd();  // Ends the group also after an error.
        return first_error == nccl::kSuccess ? end : first_error;
      });
  if (to + receives[own].offset != from + sends[own].offset) {
    copy_on_device(to + receives[own].offset, from + sends[own].offset, sends[own].size_bytes,
                   impl_->device(), stream);
  }
}

void NcclCommunicator::all_gather(const void* input, void* output, int64_t size_bytes,
                                  Stream stream) {
  impl_->call("ncclAllGather", [&](const nccl::Functions& nccl, nccl::Comm comm) {
    return nccl.AllGather(input, output, static_cast<size_t>(size_bytes), nccl::kUint8, comm,
                          cuda_stream(stream));
  });
}

void NcclCommunicator::check_error() { impl_->check(); }

void NcclCommunicator::abort(const std::string& reason) { impl_->abort(reason); }

}  // namespace narrowfloat
