// The part of CUDA's runtime that the library and its tests call, for one emulated GPU whose memory
// other processes cannot reach, of compute capability 9.0 or NARROWFLOAT_EMULATED_MAJOR.0. Streams
// are in order with everything: a call has done its work when it returns, unless its stream is
// being captured.
#include "emulator/runtime.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace {

using Work = std::function<cudaError_t()>;

constexpr int kMultiprocessors = 6;
constexpr size_t kMemoryBytes = size_t{4} << 30;

struct Node {
  cudaGraphNodeType type;
  Work work;
};

struct Graph {
  std::vector<Node> nodes;
};

struct Stream {
  Graph* capture = nullptr;
};

struct State {
  std::mutex mutex;
  bool has_failed = false;
  std::map<void*, size_t> allocations;
  std::map<const void*, size_t> opted_in;  // Kernels, to dynamic shared memory.
  size_t allocated = 0;
};

State& state() {
  static State instance;
  return instance;
}

thread_local cudaError_t last_error = cudaSuccess;

cudaError_t result(cudaError_t status) {
  if (status == cudaSuccess && state().has_failed) status = cudaErrorLaunchFailure;
  if (status != cudaSuccess) last_error = status;
  return status;
}

bool is_default(cudaStream_t stream) {
  return stream == nullptr || stream == cudaStreamPerThread || stream == cudaStreamLegacy;
}

int compute_major() {
  const char* const other = std::getenv("NARROWFLOAT_EMULATED_MAJOR");
  return other == nullptr ? 9 : std::atoi(other);
}

Graph* capture_of(cudaStream_t stream) {
  return is_default(stream) ? nullptr : reinterpret_cast<Stream*>(stream)->capture;
}

cudaError_t run_or_capture(cudaStream_t stream, cudaGraphNodeType type, Work work) {
  if (Graph* graph = capture_of(stream)) {
    graph->nodes.push_back({type, std::move(work)});
    return cudaSuccess;
  }
  return result(work());
}

cudaError_t allocate(void** data, size_t bytes) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (s.allocated + bytes > kMemoryBytes) return result(cudaErrorMemoryAllocation);
  *data = std::aligned_alloc(256, (bytes / 256 + 1) * 256);
  s.allocations[*data] = bytes;
  s.allocated += bytes;
  return result(cudaSuccess);
}

cudaError_t release(void* data) {
  if (data == nullptr) return result(cudaSuccess);
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto found = s.allocations.find(data);
  if (found == s.allocations.end()) return result(cudaErrorInvalidValue);
  s.allocated -= found->second;
  s.allocations.erase(found);
  std::free(data);
  return result(cudaSuccess);
}

}  // namespace

namespace emulator {

cudaError_t queue(cudaStream_t stream, std::function<cudaError_t()> work) {
  return run_or_capture(stream, cudaGraphNodeTypeKernel, std::move(work));
}

// Others than Hopper have what the smallest of their generation has, an RTX 3090's.
int shared_bytes_limit() { return (compute_major() == 9 ? 227 : 99) * 1024; }

size_t shared_bytes_of(const void* kernel) {
  constexpr size_t kWithoutOptIn = 48 * 1024;
  const std::lock_guard lock(state().mutex);
  const auto found = state().opted_in.find(kernel);
  return found == state().opted_in.end() ? kWithoutOptIn : found->second;
}

cudaError_t refuse_launch() { return result(cudaErrorInvalidValue); }

cudaError_t fail_device() {
  state().has_failed = true;
  return cudaErrorLaunchFailure;
}

}  // namespace emulator

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  return device == 0 ? cudaSuccess : result(cudaErrorInvalidDevice);
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int /*device*/) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = compute_major();
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = kMultiprocessors;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = emulator::shared_bytes_limit();
      return cudaSuccess;
    default:
      return result(cudaErrorInvalidValue);
  }
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int /*device*/) {
  *properties = {};
  std::strncpy(properties->name, "emulated GPU", sizeof(properties->name) - 1);
  properties->major = compute_major();
  properties->totalGlobalMem = kMemoryBytes;
  properties->multiProcessorCount = kMultiprocessors;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value) {
  if (value > emulator::shared_bytes_limit()) return result(cudaErrorInvalidValue);
  const std::lock_guard lock(state().mutex);
  state().opted_in[kernel] = static_cast<size_t>(value);
  return cudaSuccess;
}
cudaError_t cudaDeviceReset() {
  state().has_failed = false;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return result(cudaSuccess); }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const std::lock_guard lock(state().mutex);
  *total = kMemoryBytes;
  *free = kMemoryBytes - state().allocated;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** data, size_t bytes) { return allocate(data, bytes); }
cudaError_t cudaHostAlloc(void** data, size_t bytes, unsigned /*flags*/) {
  return allocate(data, bytes);
}
cudaError_t cudaFreeHost(void* data) { return release(data); }
cudaError_t cudaFree(void* data) { return release(data); }
cudaError_t cudaMallocAsync(void** data, size_t bytes, cudaStream_t stream) {
  if (capture_of(stream) != nullptr) return result(cudaErrorStreamCaptureUnsupported);
  return allocate(data, bytes);
}
cudaError_t cudaFreeAsync(void* data, cudaStream_t /*stream*/) { return release(data); }
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int /*device*/) {
  *pool = nullptr;
  return cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind /*kind*/,
                            cudaStream_t stream) {
  return run_or_capture(stream, cudaGraphNodeTypeMemcpy, [=] {
    std::memmove(to, from, bytes);
    return cudaSuccess;
  });
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return run_or_capture(stream, cudaGraphNodeTypeMemset, [=] {
    std::memset(to, value, bytes);
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetPCIBusId(char* bus_id, int length, int /*device*/) {
  std::strncpy(bus_id, "0000:00:00.0", static_cast<size_t>(length));
  return cudaSuccess;
}
cudaError_t cudaDeviceGetByPCIBusId(int* device, const char* /*bus_id*/) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* /*can_access*/, int /*device*/, int /*peer*/) {
  return result(cudaErrorInvalidDevice);
}
cudaError_t cudaDeviceGetP2PAttribute(int* /*value*/, cudaDeviceP2PAttr, int /*from*/, int /*to*/) {
  return result(cudaErrorInvalidDevice);
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* /*handle*/, void* /*data*/) {
  return result(cudaErrorNotSupported);
}
cudaError_t cudaIpcOpenMemHandle(void** /*data*/, cudaIpcMemHandle_t, unsigned /*flags*/) {
  return result(cudaErrorNotSupported);
}
cudaError_t cudaIpcCloseMemHandle(void* /*data*/) { return result(cudaErrorNotSupported); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* /*event*/, unsigned /*flags*/) {
  return result(cudaErrorNotSupported);
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return result(cudaErrorNotSupported); }
cudaError_t cudaEventDestroy(cudaEvent_t) { return result(cudaErrorNotSupported); }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned /*flags*/) {
  return result(cudaErrorNotSupported);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned /*flags*/) {
  *stream = reinterpret_cast<cudaStream_t>(new Stream);
  return result(cudaSuccess);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete reinterpret_cast<Stream*>(stream);
  return result(cudaSuccess);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return result(capture_of(stream) == nullptr ? cudaSuccess : cudaErrorStreamCaptureUnsupported);
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode /*mode*/) {
  if (is_default(stream)) return result(cudaErrorStreamCaptureUnsupported);
  reinterpret_cast<Stream*>(stream)->capture = new Graph;
  return result(cudaSuccess);
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  auto* own = reinterpret_cast<Stream*>(stream);
  *graph = reinterpret_cast<cudaGraph_t>(own->capture);
  own->capture = nullptr;
  return result(cudaSuccess);
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  auto& all = reinterpret_cast<Graph*>(graph)->nodes;
  if (nodes != nullptr) {
    for (size_t i = 0; i < all.size(); ++i) nodes[i] = reinterpret_cast<cudaGraphNode_t>(&all[i]);
  }
  *count = all.size();
  return cudaSuccess;
}
cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* type) {
  *type = reinterpret_cast<Node*>(node)->type;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                 unsigned long long /*flags*/) {
  *executable = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t /*stream*/) {
  for (const Node& node : reinterpret_cast<Graph*>(executable)->nodes) {
    const cudaError_t status = result(node.work());
    if (status != cudaSuccess) return status;
  }
  return result(cudaSuccess);
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete reinterpret_cast<Graph*>(executable);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorLaunchFailure ? "a kernel failed" : "an error of the emulator";
}
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorLaunchFailure ? "cudaErrorLaunchFailure" : "cudaError";
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

}  // extern "C"
