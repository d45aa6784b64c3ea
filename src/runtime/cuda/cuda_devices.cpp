// See cuda_devices.h.
#include "runtime/cuda/cuda_devices.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <string_view>

#include "base/throw_error.h"
#include "runtime/cuda/cuda_check.h"
#include "runtime/cuda/device_code.h"
#include "runtime/cuda/fast_math.h"
#include "runtime/cuda/shared_memory_opt_in.h"

namespace narrowfloat {
namespace {

constexpr int kMaxDevices = 64;

int attribute(int device, cudaDeviceAttr which) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

struct Entry {
  CudaDevice device;
  int minor = 0;  // Minor part of the compute capability.
  DeviceCode code;
};

// The driver's own variable, which makes it compile PTX where it has machine code.
bool forces_ptx() {
  const char* const value = std::getenv("CUDA_FORCE_PTX_JIT");
  return value != nullptr && std::string_view(value) == "1";
}

// Returns 0 without a driver or a GPU.
int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return std::min(count, kMaxDevices);
  cudaGetLastError();  // Clears the error of the failed call.
  return 0;
}

const Entry& entry_of(int index) {
  static std::mutex mutex;
  static std::array<std::optional<Entry>, kMaxDevices> entries;
  const std::lock_guard lock(mutex);
  const int count = device_count();
  if (count == 0) {
    throw_error(ErrorKind::kDevice, "device: there are no CUDA devices, got cuda:{}", index);
  }
  if (index < 0 || index >= count) {
    throw_error(ErrorKind::kDevice, "device: expected cuda:0 to cuda:{}, got cuda:{}", count - 1,
                index);
  }
  std::optional<Entry>& entry = entries[static_cast<size_t>(index)];
  if (!entry) {
    const int major = attribute(index, cudaDevAttrComputeCapabilityMajor);
    const int minor = attribute(index, cudaDevAttrComputeCapabilityMinor);
    const DeviceCode code = find_device_code(compiled_architectures(), major, minor, forces_ptx());
    entry = Entry{.device = {.compute_major = major,
                             .num_sms = attribute(index, cudaDevAttrMultiProcessorCount),
                             .max_shared_bytes_per_block =
                                 attribute(index, cudaDevAttrMaxSharedMemoryPerBlockOptin),
                             .has_own_code = code.kind == DeviceCodeKind::kOwn},
                  .minor = minor,
                  .code = code};
  }
  return *entry;
}

}  // namespace

void check_cuda(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // Clears the error that is reported here.
  throw_error(ErrorKind::kDevice, "{}: {} ({})", call, cudaGetErrorString(status),
              cudaGetErrorName(status));
}

const CudaDevice& cuda_device(int index) { return entry_of(index).device; }

Support runs_on_cuda(Device device) {
  if (device.type != DeviceType::kCuda) return Support::no("runs on CUDA devices only");
  const int count = device_count();
  if (device.index < 0 || device.index >= count) {
    return Support::no(fmt::format("there is no {}: {} CUDA devices", to_string(device), count));
  }
  const Entry& entry = entry_of(device.index);
  if (entry.code.kind != DeviceCodeKind::kNone) return Support::yes();
  return Support::no(fmt::format(
      "{} has compute capability {}.{}, the build has code for {} (CMAKE_CUDA_ARCHITECTURES)",
      to_string(device), entry.device.compute_major, entry.minor, compiled_architectures()));
}

Support runs_own_code(Device device) {
  Support support = runs_on_cuda(device);
  if (!support.ok() || entry_of(device.index).device.has_own_code) return support;
  return Support::no("needs code for exactly this GPU, which runs the portable code");
}

Support runs_portable_code(Device device) {
  Support support = runs_on_cuda(device);
  if (!support.ok() || !entry_of(device.index).device.has_own_code) return support;
  return Support::no("is for GPUs that this build has no code of their own for");
}

Support has_fast_math(Device device) {
  if (cuda_device(device.index).compute_major == 9) return Support::yes();
  return Support::no("fast mode has the approximate reciprocal of Hopper; use exact mode");
}

bool current_device_has_own_code() {
  int index = 0;
  check_cuda(cudaGetDevice(&index), "cudaGetDevice");
  return entry_of(index).device.has_own_code;
}

std::vector<GpuInfo> list_gpus() {
  std::vector<GpuInfo> gpus;
  for (int i = 0; i < device_count(); ++i) {
    cudaDeviceProp properties{};
    check_cuda(cudaGetDeviceProperties(&properties, i), "cudaGetDeviceProperties");
    gpus.push_back({.name = properties.name,
                    .compute_capability = fmt::format("{}.{}", properties.major, properties.minor),
                    .memory_bytes = static_cast<int64_t>(properties.totalGlobalMem),
                    .architecture = std::string(entry_of(i).code.architecture)});
  }
  return gpus;
}

void SharedMemoryOptIn::allow(const void* kernel, size_t bytes, int device) {
  static_assert(kMaxDevices == 64);
  const uint64_t bit = uint64_t{1} << device;
  if ((devices_.load(std::memory_order_acquire) & bit) != 0) return;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(bytes)),
             "cudaFuncSetAttribute");
  devices_.fetch_or(bit, std::memory_order_release);
}

CudaDeviceScope::CudaDeviceScope(Device device) {
  int current = 0;
  check_cuda(cudaGetDevice(&current), "cudaGetDevice");
  if (current == device.index) return;
  check_cuda(cudaSetDevice(device.index), "cudaSetDevice");
  previous_ = current;
}

CudaDeviceScope::~CudaDeviceScope() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

}  // namespace narrowfloat
