// Facts that doctor shows about what connects the GPUs: NCCL and peer access.
#include "narrowfloat/allreduce.h"
#if defined(NARROWFLOAT_CUDA)
#include "runtime/cuda/gpu_links.h"
#include "runtime/cuda/nccl_library.h"
#endif

namespace narrowfloat {

NcclInfo nccl_info() {
#if defined(NARROWFLOAT_CUDA)
  return find_nccl();
#else
  return {.found = false, .version = {}, .path = {}, .reason = "this build has no CUDA"};
#endif
}

std::vector<GpuLink> gpu_links() {
#if defined(NARROWFLOAT_CUDA)
  return list_gpu_links();
#else
  return {};
#endif
}

}  // namespace narrowfloat
