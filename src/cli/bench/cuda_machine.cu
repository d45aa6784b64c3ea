// A GPU as a machine for sweeps. Calls are captured into a CUDA graph and timed by events around
// replays of it, so that the host takes no part: microseconds of a call are the time of a replay
// divided by the calls in it.
#include <algorithm>
#include <cuda_runtime.h>
#include <fstream>
#include <string>
#include <utility>

#include "cli/bench/cuda_kernels.h"
#include "cli/bench/machine.h"
#include "narrowfloat/error.h"

namespace narrowfloat::cli {
namespace {

void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // Reported here: it must not show up in a later check.
  throw Error(ErrorKind::kDevice, std::string(call) + ": " + cudaGetErrorString(status) + " (" +
                                      cudaGetErrorName(status) + ")");
}

int attribute(int device, cudaDeviceAttr which) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

// "580.65.06", from the line that the kernel module shows; empty where it shows none.
std::string driver_version() {
  std::ifstream file("/proc/driver/nvidia/version");
  std::string word;
  for (int i = 0; i < 32 && file >> word; ++i) {
    const bool has_digits_and_dots = word.find_first_not_of("0123456789.") == std::string::npos &&
                                     word.find('.') != std::string::npos;
    if (has_digits_and_dots) return word;
  }
  return "";
}

std::string cuda_runtime_version() {
  int number = 0;
  check(cudaRuntimeGetVersion(&number), "cudaRuntimeGetVersion");
  return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
}

MachineFacts facts_of(int index) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
  MachineFacts facts;
  facts.name = properties.name;
  facts.compute_capability =
      std::to_string(properties.major) + "." + std::to_string(properties.minor);
  facts.driver = driver_version();
  facts.cuda_runtime = cuda_runtime_version();
  facts.num_units = properties.multiProcessorCount;
  facts.max_clock_mhz = attribute(index, cudaDevAttrClockRate) / 1000;
  facts.cache_bytes = static_cast<uint64_t>(properties.l2CacheSize);
  facts.memory_bytes = properties.totalGlobalMem;
  // With 512 MB an H100 reads 2 % slower.
  facts.stream_bytes = std::min<uint64_t>(uint64_t{2} << 30U, facts.memory_bytes / 8);
  facts.has_programmatic_launch = properties.major >= 9;
  return facts;
}

class Graph {
 public:
  // What `queue` queues on the stream while it is captured. Captures of other threads go on.
  template <typename Queue>
  Graph(cudaStream_t stream, const Queue& queue) {
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
          "cudaStreamBeginCapture");
    cudaGraph_t graph = nullptr;
    try {
      queue();
    } catch (...) {
      cudaStreamEndCapture(stream, &graph);
      if (graph != nullptr) cudaGraphDestroy(graph);
      cudaGetLastError();  // Of the broken capture: it must not show up in a later check.
      throw;
    }
    check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    size_t nodes = 0;
    const cudaError_t counted = cudaGraphGetNodes(graph, nullptr, &nodes);
    num_nodes_ = static_cast<int64_t>(nodes);
    const cudaError_t status = cudaGraphInstantiate(&executable_, graph, 0);
    cudaGraphDestroy(graph);
    check(counted, "cudaGraphGetNodes");
    check(status, "cudaGraphInstantiate");
    check(cudaGraphUpload(executable_, stream), "cudaGraphUpload");
  }
  ~Graph() { cudaGraphExecDestroy(executable_); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  [[nodiscard]] int64_t num_nodes() const { return num_nodes_; }
  void launch(cudaStream_t stream) const {
    check(cudaGraphLaunch(executable_, stream), "cudaGraphLaunch");
  }

 private:
  cudaGraphExec_t executable_ = nullptr;
  int64_t num_nodes_ = 0;
};

class Events {
 public:
  explicit Events(int count) : events_(static_cast<size_t>(count)) {
    for (cudaEvent_t& event : events_) check(cudaEventCreate(&event), "cudaEventCreate");
  }
  ~Events() {
    for (const cudaEvent_t event : events_) cudaEventDestroy(event);
  }
  Events(const Events&) = delete;
  Events& operator=(const Events&) = delete;

  void record(int index, cudaStream_t stream) {
    check(cudaEventRecord(events_[static_cast<size_t>(index)], stream), "cudaEventRecord");
  }
  [[nodiscard]] double us_since_previous(int index) const {
    const auto at = static_cast<size_t>(index);
    float ms = 0;
    check(cudaEventElapsedTime(&ms, events_[at - 1], events_[at]), "cudaEventElapsedTime");
    return 1e3 * static_cast<double>(ms);
  }

 private:
  std::vector<cudaEvent_t> events_;
};

class CudaMachine : public Machine {
 public:
  explicit CudaMachine(int index) : index_(index), facts_(facts_of(index)) {
    check(cudaSetDevice(index), "cudaSetDevice");
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    check(cudaMalloc(&flag_, sizeof(int)), "cudaMalloc");
  }
  // Errors of a device that failed before have been reported.
  ~CudaMachine() override {
    cudaFree(memory_);
    cudaFree(flag_);
    cudaStreamDestroy(stream_);
  }
  CudaMachine(const CudaMachine&) = delete;
  CudaMachine& operator=(const CudaMachine&) = delete;

  [[nodiscard]] Device device() const override { return {DeviceType::kCuda, index_}; }
  [[nodiscard]] const MachineFacts& facts() const override { return facts_; }

  std::byte* reserve(uint64_t size_bytes) override {
    if (size_bytes > size_bytes_) {
      check(cudaFree(memory_), "cudaFree");
      memory_ = nullptr;
      size_bytes_ = 0;
      void* memory = nullptr;
      const cudaError_t status = cudaMalloc(&memory, size_bytes);
      if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        // No kDevice: smaller cases still have room.
        throw Error(ErrorKind::kUnsupported, "no room for " + std::to_string(size_bytes) +
                                                 " bytes on cuda:" + std::to_string(index_));
      }
      check(status, "cudaMalloc");
      memory_ = static_cast<std::byte*>(memory);
      size_bytes_ = size_bytes;
    }
    return memory_;
  }

  void fill_random(std::byte* to, DType dtype, int64_t first, int64_t count) override {
    queue_normal_fill(to, dtype, first, count, stream_);
  }
  void fill_words(std::byte* to, const RandomWords& words, uint64_t size_bytes) override {
    queue_random_words(to, size_bytes, words, stream_);
  }
  void fill_bytes(std::byte* to, uint8_t value, uint64_t size_bytes) override {
    check(cudaMemsetAsync(to, value, size_bytes, stream_), "cudaMemsetAsync");
  }
  void copy(std::byte* to, const std::byte* from, uint64_t size_bytes) override {
    check(cudaMemcpyAsync(to, from, size_bytes, cudaMemcpyDeviceToDevice, stream_),
          "cudaMemcpyAsync");
  }
  void write(std::byte* to, const std::byte* host, uint64_t size_bytes) override {
    check(cudaMemcpyAsync(to, host, size_bytes, cudaMemcpyHostToDevice, stream_),
          "cudaMemcpyAsync");
    wait();
  }
  void read(std::byte* host, const std::byte* from, uint64_t size_bytes) override {
    check(cudaMemcpyAsync(host, from, size_bytes, cudaMemcpyDeviceToHost, stream_),
          "cudaMemcpyAsync");
    wait();
  }
  bool is_equal(const std::byte* a, const std::byte* b, uint64_t size_bytes) override {
    check(cudaMemsetAsync(flag_, 0, sizeof(int), stream_), "cudaMemsetAsync");
    queue_comparison(a, b, size_bytes, flag_, stream_);
    int differs = 0;
    check(cudaMemcpyAsync(&differs, flag_, sizeof(int), cudaMemcpyDeviceToHost, stream_),
          "cudaMemcpyAsync");
    wait();
    return differs == 0;
  }

  [[nodiscard]] std::vector<TrafficShape> traffic_shapes(const Traffic& traffic) const override {
    constexpr uint64_t kSmallBytes = 1U << 20U;
    constexpr uint64_t kLargeBytes = 64U << 20U;
    const uint64_t size_bytes = traffic.read_bytes + traffic.write_bytes;
    if (size_bytes < kSmallBytes) return {{128, 1}, {256, 1}};
    if (size_bytes < kLargeBytes) return {{128, 1}, {256, 1}, {256, 2}};
    return {{256, 2}, {256, 4}, {512, 2}};
  }
  void queue_traffic(const Traffic& traffic, const TrafficShape& shape, Stream stream) override {
    queue_traffic_kernel(traffic, shape, stream);
  }
  void queue_copy(std::byte* to, const std::byte* from, uint64_t size_bytes,
                  Stream stream) override {
    check(cudaMemcpyAsync(to, from, size_bytes, cudaMemcpyDeviceToDevice,
                          static_cast<cudaStream_t>(stream.handle)),
          "cudaMemcpyAsync");
  }

  void wait() override { check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }
  double run_once(const QueuedCall& call) override {
    Events events(2);
    events.record(0, stream_);
    call(0, {.handle = stream_});
    events.record(1, stream_);
    wait();
    return events.us_since_previous(1);
  }

  // All replays are queued at once: an event between two of them is reached without waiting for
  // the host, which queues a graph faster than the GPU runs it.
  CallTime time_calls(const QueuedCall& call, const ReplayPlan& plan) override {
    const Stream stream{.handle = stream_, .programmatic_launch = plan.is_programmatic};
    const Graph graph(stream_, [&] {
      for (int64_t i = 0; i < plan.calls; ++i) call(i, stream);
    });
    graph.launch(stream_);
    Events events(plan.replays + 1);
    events.record(0, stream_);
    for (int i = 1; i <= plan.replays; ++i) {
      graph.launch(stream_);
      events.record(i, stream_);
    }
    wait();
    std::vector<double> us_per_call;
    for (int i = 1; i <= plan.replays; ++i) {
      us_per_call.push_back(events.us_since_previous(i) / static_cast<double>(plan.calls));
    }
    return call_time(std::move(us_per_call), plan.calls);
  }

  int64_t count_launches(const QueuedCall& call) override {
    return Graph(stream_, [&] { call(0, {.handle = stream_, .programmatic_launch = true}); })
        .num_nodes();
  }

 private:
  int index_ = 0;
  MachineFacts facts_;
  cudaStream_t stream_ = nullptr;
  std::byte* memory_ = nullptr;
  uint64_t size_bytes_ = 0;
  int* flag_ = nullptr;
};

}  // namespace

std::unique_ptr<Machine> open_gpu(int index) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    cudaGetLastError();
    throw Error(ErrorKind::kUnsupported, std::string("no GPU can be used: ") +
                                             cudaGetErrorString(status) +
                                             "; `nvidia-smi` shows what the driver sees");
  }
  if (index >= count) {
    throw Error(ErrorKind::kUnsupported, "there is no cuda:" + std::to_string(index) + ": " +
                                             std::to_string(count) +
                                             " GPUs; see `narrowfloat "
                                             "doctor`, and CUDA_VISIBLE_DEVICES");
  }
  return std::make_unique<CudaMachine>(index);
}

}  // namespace narrowfloat::cli
