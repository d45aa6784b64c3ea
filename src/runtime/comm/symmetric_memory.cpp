// See symmetric_memory.h. This file checks the arguments and chooses the transport.
#include "runtime/comm/symmetric_memory.h"

#include <string>

#include "base/name_table.h"
#include "base/throw_error.h"
#include "runtime/comm/phase.h"
#include "runtime/comm/posix_shared_memory.h"
#if defined(NARROWFLOAT_CUDA)
#include "runtime/cuda/cuda_symmetric_memory.h"
#endif

namespace narrowfloat {
namespace {

struct TransportName {
  AllReduceTransport id;
  std::string_view name;
};
constexpr TransportName kTransportNames[] = {
    {AllReduceTransport::kAuto, "auto"},
    {AllReduceTransport::kThreads, "threads"},
    {AllReduceTransport::kSharedMemory, "shared_memory"},
    {AllReduceTransport::kCudaIpc, "cuda_ipc"},
    {AllReduceTransport::kCudaVmm, "cuda_vmm"},
    {AllReduceTransport::kVirtual, "virtual"},
    {AllReduceTransport::kNone, "none"},
};

// In the order in which kAuto tries them.
std::vector<AllReduceTransport> transports_of(DeviceType type) {
  if (type == DeviceType::kCpu) return {AllReduceTransport::kSharedMemory};
  return {AllReduceTransport::kCudaVmm, AllReduceTransport::kCudaIpc};
}

std::vector<AllReduceTransport> candidates_for(Device device, AllReduceTransport transport) {
  std::vector<AllReduceTransport> all = transports_of(device.type);
  if (transport == AllReduceTransport::kAuto) return all;
  std::string allowed = "auto";
  for (const AllReduceTransport candidate : all) {
    if (candidate == transport) return {candidate};
    allowed += fmt::format(", {}", name(candidate));
  }
  throw_invalid("transport: expected one of {} for ranks in processes on {}, got {}", allowed,
                to_string(device), name(transport));
}

std::unique_ptr<SymmetricMemory> make_with(Bootstrap& bootstrap, Device device,
                                           AllReduceTransport transport, int64_t size_bytes) {
  if (transport == AllReduceTransport::kSharedMemory) {
    return make_posix_shared_memory(bootstrap, device, size_bytes);
  }
#if defined(NARROWFLOAT_CUDA)
  if (transport == AllReduceTransport::kCudaVmm) {
    return make_cuda_vmm_memory(bootstrap, device, size_bytes);
  }
  return make_cuda_ipc_memory(bootstrap, device, size_bytes);
#else
  throw PhaseError(ErrorKind::kUnsupported, "this build has no CUDA");
#endif
}

}  // namespace

std::string_view name(AllReduceTransport transport) {
  return record_of(kTransportNames, transport, "AllReduceTransport").name;
}

void check_region_size(int ranks, int64_t size_bytes) {
  if (ranks < 1 || ranks > SymmetricMemory::kMaxRanks) {
    throw_invalid("ranks: expected 1 to {}, got {}", SymmetricMemory::kMaxRanks, ranks);
  }
  if (size_bytes < 1 || size_bytes > int64_t{1} << 62) {
    throw_invalid("size_bytes: expected 1 to 2^62, got {}", size_bytes);
  }
}

std::unique_ptr<SymmetricMemory> make_symmetric_memory(Bootstrap& bootstrap, Device device,
                                                       AllReduceTransport transport,
                                                       int64_t size_bytes) {
  std::vector<AllReduceTransport> candidates;
  run_phase(bootstrap, "checking the arguments of peer memory", [&] {
    check_region_size(bootstrap.size(), size_bytes);
    candidates = candidates_for(device, transport);
  });
  bootstrap.require_equal("peer memory",
                          fmt::format("{} bytes, transport {}, on {}", size_bytes, name(transport),
                                      device.type == DeviceType::kCpu ? "CPUs" : "GPUs"));
  std::string reasons;
  for (const AllReduceTransport candidate : candidates) {
    try {
      return make_with(bootstrap, device, candidate, size_bytes);
    } catch (const PhaseError& error) {
      reasons += fmt::format("\n{}: {}", name(candidate), error.what());
    }
  }
  throw_error(ErrorKind::kUnsupported, "{} ranks cannot share {} bytes of memory each:{}",
              bootstrap.size(), size_bytes, reasons);
}

}  // namespace narrowfloat
