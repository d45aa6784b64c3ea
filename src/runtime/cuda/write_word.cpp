// See write_word.h.
#include "runtime/cuda/write_word.h"

#include <cuda.h>

#include "base/throw_error.h"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/driver_function.h"

namespace narrowfloat {

void write_word(uint32_t* to, uint32_t value, Device device, Stream stream) {
  static const auto kStore =
      driver_function<decltype(&cuStreamWriteValue32)>("cuStreamWriteValue32");
  const CudaDeviceScope scope(device);
  const CUresult status =
      kStore(static_cast<CUstream>(stream.handle), reinterpret_cast<CUdeviceptr>(to), value,
             CU_STREAM_WRITE_VALUE_DEFAULT);
  if (status == CUDA_SUCCESS) return;
  throw_error(ErrorKind::kDevice, "cuStreamWriteValue32 on {}: CUDA error {}", to_string(device),
              static_cast<int>(status));
}

}  // namespace narrowfloat
