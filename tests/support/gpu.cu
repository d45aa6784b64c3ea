// See gpu.h.
#include <algorithm>
#include <vector>

#include "runtime/cuda/cuda_check.h"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/launch.h"
#include "support/gpu.h"

namespace narrowfloat::testing {
namespace {

std::vector<cudaGraphNodeType> node_types(cudaGraph_t graph) {
  size_t count = 0;
  check_cuda(cudaGraphGetNodes(graph, nullptr, &count), "cudaGraphGetNodes");
  std::vector<cudaGraphNode_t> nodes(count);
  if (count > 0) check_cuda(cudaGraphGetNodes(graph, nodes.data(), &count), "cudaGraphGetNodes");
  std::vector<cudaGraphNodeType> types(count);
  for (size_t i = 0; i < count; ++i) {
    check_cuda(cudaGraphNodeGetType(nodes[i], &types[i]), "cudaGraphNodeGetType");
  }
  return types;
}

}  // namespace

std::string gpu_missing(int index) {
  const Support support = runs_on_cuda(gpu(index));
  if (support.ok()) return {};
  return "skipped: no CUDA device that this build has code for: " + std::string(support.reason());
}

bool gpu_has_own_code(int index) { return runs_own_code(gpu(index)).ok(); }

std::string gpu_implementation(std::string_view idea, int index) {
  return (gpu_has_own_code(index) ? "sm90_" : "sm80_") + std::string(idea);
}

CudaStream::CudaStream(Device device) : device_(device) {
  const CudaDeviceScope scope(device);
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
             "cudaStreamCreateWithFlags");
  handle_ = stream;
}

CudaStream::~CudaStream() {
  const CudaDeviceScope scope(device_);
  cudaStreamDestroy(cuda_stream(get()));
}

void CudaStream::synchronize() const {
  check_cuda(cudaStreamSynchronize(cuda_stream(get())), "cudaStreamSynchronize");
}

CapturedGraph::CapturedGraph(const CudaStream& stream, const std::function<void()>& body)
    : stream_(stream) {
  const cudaStream_t queue = cuda_stream(stream.get());
  check_cuda(cudaStreamBeginCapture(queue, cudaStreamCaptureModeThreadLocal),
             "cudaStreamBeginCapture");
  cudaGraph_t graph = nullptr;
  try {
    body();
  } catch (...) {
    cudaStreamEndCapture(queue, &graph);
    cudaGetLastError();  // The broken capture must not show up in a later check.
    throw;
  }
  check_cuda(cudaStreamEndCapture(queue, &graph), "cudaStreamEndCapture");
  graph_ = graph;
  const std::vector<cudaGraphNodeType> types = node_types(graph);
  num_nodes_ = static_cast<int64_t>(types.size());
  num_other_nodes_ = std::ranges::count_if(types, [](cudaGraphNodeType type) {
    return type != cudaGraphNodeTypeKernel && type != cudaGraphNodeTypeMemset;
  });
  cudaGraphExec_t executable = nullptr;
  check_cuda(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
  executable_ = executable;
}

CapturedGraph::~CapturedGraph() {
  if (executable_ != nullptr) cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(executable_));
  if (graph_ != nullptr) cudaGraphDestroy(static_cast<cudaGraph_t>(graph_));
}

void CapturedGraph::replay(int times) const {
  for (int i = 0; i < times; ++i) {
    check_cuda(
        cudaGraphLaunch(static_cast<cudaGraphExec_t>(executable_), cuda_stream(stream_.get())),
        "cudaGraphLaunch");
  }
  stream_.synchronize();
}

void synchronize_device(Device device) {
  const CudaDeviceScope scope(device);
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

int64_t free_device_memory(Device device) {
  const CudaDeviceScope scope(device);
  size_t free = 0;
  size_t total = 0;
  check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return static_cast<int64_t>(free);
}

int current_device() {
  int index = 0;
  check_cuda(cudaGetDevice(&index), "cudaGetDevice");
  return index;
}

bool has_cuda_error() { return cudaPeekAtLastError() != cudaSuccess; }

}  // namespace narrowfloat::testing
