// See gpu_links.h.
#include "runtime/cuda/gpu_links.h"

#include <cuda_runtime_api.h>

#include "runtime/cuda/cuda_check.h"
#include "runtime/cuda/cuda_devices.h"

namespace narrowfloat {
namespace {

int link_attribute(cudaDeviceP2PAttr which, int from, int to) {
  int value = 0;
  check_cuda(cudaDeviceGetP2PAttribute(&value, which, from, to), "cudaDeviceGetP2PAttribute");
  return value;
}

}  // namespace

std::vector<GpuLink> list_gpu_links() {
  const int count = static_cast<int>(list_gpus().size());
  std::vector<GpuLink> links;
  for (int from = 0; from < count; ++from) {
    for (int to = 0; to < count; ++to) {
      if (to == from) continue;
      int can_access = 0;
      check_cuda(cudaDeviceCanAccessPeer(&can_access, from, to), "cudaDeviceCanAccessPeer");
      links.push_back(
          {.from = from,
           .to = to,
           .peer_access = can_access != 0,
           .native_atomics = link_attribute(cudaDevP2PAttrNativeAtomicSupported, from, to) != 0,
           .performance_rank = link_attribute(cudaDevP2PAttrPerformanceRank, from, to)});
    }
  }
  return links;
}

}  // namespace narrowfloat
