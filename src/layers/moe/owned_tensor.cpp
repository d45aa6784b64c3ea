// See owned_tensor.h.
#include "layers/moe/owned_tensor.h"

#include <cstring>

#include "base/throw_error.h"
#include "runtime/support.h"
#if defined(NARROWFLOAT_CUDA)
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/device_memory.h"
#endif

namespace narrowfloat {
namespace {

int64_t size_bytes(const TensorView& view) { return view.num_elements() * bits(view.dtype) / 8; }

}  // namespace

// Without CUDA no tensor on a device gets here: require_usable_device refuses it.
OwnedTensor::OwnedTensor(const TensorView& source, Stream stream) : view_(source) {
  if (source.is_absent()) return;
  const int64_t size = size_bytes(source);
#if defined(NARROWFLOAT_CUDA)
  if (source.device.type == DeviceType::kCuda) {
    memory_ = allocate_device_memory(source.device, size);
    copy_on_device(memory_.get(), source.data, size, source.device, stream);
    view_.data = memory_.get();
    return;
  }
#endif
  static_cast<void>(stream);
  memory_ = std::shared_ptr<uint8_t>(new uint8_t[static_cast<size_t>(size)],
                                     std::default_delete<uint8_t[]>());
  if (size > 0) std::memcpy(memory_.get(), source.data, static_cast<size_t>(size));
  view_.data = memory_.get();
}

std::vector<float> floats_on_host(const TensorView& source, Stream stream) {
  std::vector<float> values(static_cast<size_t>(source.num_elements()));
#if defined(NARROWFLOAT_CUDA)
  if (source.device.type == DeviceType::kCuda) {
    copy_to_host(values.data(), source.data, size_bytes(source), source.device, stream);
    return values;
  }
#endif
  static_cast<void>(stream);
  if (!values.empty()) {
    std::memcpy(values.data(), source.data, static_cast<size_t>(size_bytes(source)));
  }
  return values;
}

void wait_for_copies(Device device, Stream stream) {
#if defined(NARROWFLOAT_CUDA)
  if (device.type == DeviceType::kCuda) wait_for(device, stream);
#else
  static_cast<void>(device);
  static_cast<void>(stream);
#endif
}

void require_usable_device(Device device) {
  if (device.type == DeviceType::kCpu) return;
#if defined(NARROWFLOAT_CUDA)
  const Support support = runs_on_cuda(device);
#else
  const Support support = Support::no("this build has no CUDA code");
#endif
  if (support.ok()) return;
  throw_error(ErrorKind::kUnsupported, "device: the MoE layer cannot run on {}: {}",
              to_string(device), support.reason());
}

}  // namespace narrowfloat
