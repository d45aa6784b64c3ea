// A GPU as a machine. Calls are captured into a CUDA graph and timed by events around replays of
// it, so that the host takes no part: microseconds of a call are the time of a replay divided by
// the calls in it. The kernels make inputs, compare results and move traffic; traffic is the floor
// that short operations are judged against: 16-byte loads, then 16-byte stores that depend on them,
// a CTA for every part, and the same waiting and triggering for programmatic dependent launch as
// the library's kernels have.
#include <algorithm>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <fstream>
#include <string>
#include <utility>

#include <nv/target>

#include "cli_common/timing/machine.h"
#include "narrowfloat/error.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat::cli {
namespace {

constexpr int kThreads = 256;

__device__ uint64_t mixed_bits(uint64_t index) {
  uint64_t bits = (index + 1) * 0x9E3779B97F4A7C15U;
  bits = (bits ^ (bits >> 30U)) * 0xBF58476D1CE4E5B9U;
  bits = (bits ^ (bits >> 27U)) * 0x94D049BB133111EBU;
  return bits ^ (bits >> 31U);
}

// Box and Muller's transform of two uniform numbers, the first of which is not 0.
__device__ float normal_value(uint64_t index) {
  const uint64_t bits = mixed_bits(index);
  const float first = (static_cast<float>(static_cast<uint32_t>(bits) >> 8U) + 1.0F) * 0x1p-24F;
  const float second = static_cast<float>(bits >> 40U) * 0x1p-24F;
  return sqrtf(-2.0F * logf(first)) * cospif(2.0F * second);
}

__device__ void store(float* to, float value) { *to = value; }
__device__ void store(__half* to, float value) { *to = __float2half_rn(value); }
__device__ void store(__nv_bfloat16* to, float value) { *to = __float2bfloat16_rn(value); }

template <typename Element>
__global__ void fill_normal_kernel(Element* to, int64_t first, int64_t count) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += stride) {
    store(to + i, normal_value(static_cast<uint64_t>(first + i)));
  }
}

// The words of fill_random_words() from 0 on, made on the device.
__global__ void random_words_kernel(uint64_t* to, int64_t count, RandomWords words) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += stride) {
    uint64_t bits =
        words.seed * 0xD1342543DE82EF95U + (static_cast<uint64_t>(i) + 1) * 0x9E3779B97F4A7C15U;
    bits = (bits ^ (bits >> 30U)) * 0xBF58476D1CE4E5B9U;
    bits = (bits ^ (bits >> 27U)) * 0x94D049BB133111EBU;
    to[i] = ((bits ^ (bits >> 31U)) & words.mask) + words.base;
  }
}

__global__ void compare_words_kernel(const uint4* a, const uint4* b, int64_t count, int* flag) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  bool differs = false;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += stride) {
    const uint4 x = a[i];
    const uint4 y = b[i];
    differs |= x.x != y.x || x.y != y.y || x.z != y.z || x.w != y.w;
  }
  if (differs) *flag = 1;
}

struct TrafficParams {
  const uint4* from;
  uint4* to;
  uint4* exchange;
  int64_t from_words;  // Words of 16 bytes that come from `from`, the others from `exchange`.
  int64_t to_words;
  int64_t reads;  // In all and of a CTA.
  int64_t writes;
  int reads_per_cta;
  int writes_per_cta;
};

template <int kVectors>
__global__ void move_words_kernel(TrafficParams params) {
  NV_IF_TARGET(NV_PROVIDES_SM_90, (cudaGridDependencySynchronize();))
  const int64_t read_begin = static_cast<int64_t>(blockIdx.x) * params.reads_per_cta;
  const int64_t reads = min(static_cast<int64_t>(params.reads_per_cta), params.reads - read_begin);
  uint4 words[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = i * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
    const int64_t word = read_begin + at;
    const uint4* const from = word < params.from_words
                                  ? params.from + word
                                  : params.exchange + (word - params.from_words);
    words[i] = at < reads ? *from : make_uint4(0, 0, 0, 0);
  }
  NV_IF_TARGET(NV_PROVIDES_SM_90, (cudaTriggerProgrammaticLaunchCompletion();))
  uint4 sum = words[0];
#pragma unroll
  for (int i = 1; i < kVectors; ++i) {
    sum =
        make_uint4(sum.x ^ words[i].x, sum.y ^ words[i].y, sum.z ^ words[i].z, sum.w ^ words[i].w);
  }
  const int64_t write_begin = static_cast<int64_t>(blockIdx.x) * params.writes_per_cta;
  const int64_t writes =
      min(static_cast<int64_t>(params.writes_per_cta), params.writes - write_begin);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = i * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
    const int64_t word = write_begin + at;
    uint4* const to =
        word < params.to_words ? params.to + word : params.exchange + (word - params.to_words);
    if (at < writes) *to = sum;
  }
  // The loads must stay even if nothing is written. Random data never has this value.
  if (params.writes == 0 && sum.x == 0x6E66 && sum.y == 0x6E66 && sum.z == 0x6E66) *params.to = sum;
}

void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // Reported here: it must not show up in a later check.
  throw Error(ErrorKind::kDevice, std::string(call) + ": " + cudaGetErrorString(status) + " (" +
                                      cudaGetErrorName(status) + ")");
}

int64_t ceil_quotient(int64_t a, int64_t b) { return (a + b - 1) / b; }

unsigned grid_of(int64_t count) {
  constexpr int64_t kMaxCtas = 4096;
  return static_cast<unsigned>(std::clamp<int64_t>(ceil_quotient(count, kThreads), 1, kMaxCtas));
}

template <typename Element>
void launch_fill(std::byte* to, int64_t first, int64_t count, cudaStream_t stream) {
  fill_normal_kernel<<<grid_of(count), kThreads, 0, stream>>>(reinterpret_cast<Element*>(to), first,
                                                              count);
  check(cudaGetLastError(), "fill_normal_kernel");
}

template <int kVectors>
void launch_traffic(const TrafficParams& params, int64_t ctas, int threads, Stream stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = static_cast<cudaStream_t>(stream.handle);
  config.attrs = &attribute;
  config.numAttrs = stream.programmatic_launch ? 1 : 0;
  check(cudaLaunchKernelEx(&config, move_words_kernel<kVectors>, params), "move_words_kernel");
}

// Normal values: element i is the same whatever the range it is in.
void queue_normal_fill(std::byte* to, DType dtype, int64_t first, int64_t count,
                       cudaStream_t stream) {
  if (count == 0) return;
  if (dtype == DType::kBF16) launch_fill<__nv_bfloat16>(to, first, count, stream);
  if (dtype == DType::kF16) launch_fill<__half>(to, first, count, stream);
  if (dtype == DType::kF32) launch_fill<float>(to, first, count, stream);
}

// Words of 8 bytes, the last one cut off.
void queue_random_words(std::byte* to, uint64_t size_bytes, const RandomWords& words,
                        cudaStream_t stream) {
  const auto count = static_cast<int64_t>(size_bytes / sizeof(uint64_t));
  if (count > 0) {
    random_words_kernel<<<grid_of(count), kThreads, 0, stream>>>(reinterpret_cast<uint64_t*>(to),
                                                                 count, words);
    check(cudaGetLastError(), "random_words_kernel");
  }
  const uint64_t rest = size_bytes % sizeof(uint64_t);
  if (rest == 0) return;
  const auto last = static_cast<uint64_t>(count);
  const uint64_t word = (random_word_bits(words.seed, last) & words.mask) + words.base;
  // Pageable memory: the copy has taken it when the call returns.
  check(cudaMemcpyAsync(to + last * sizeof(word), &word, rest, cudaMemcpyHostToDevice, stream),
        "cudaMemcpyAsync");
}

// Sets *flag to 1 where 16-byte words differ; never clears it.
void queue_comparison(const std::byte* a, const std::byte* b, uint64_t size_bytes, int* flag,
                      cudaStream_t stream) {
  const auto count = static_cast<int64_t>(size_bytes / sizeof(uint4));
  if (count == 0) return;
  compare_words_kernel<<<grid_of(count), kThreads, 0, stream>>>(
      reinterpret_cast<const uint4*>(a), reinterpret_cast<const uint4*>(b), count, flag);
  check(cudaGetLastError(), "compare_words_kernel");
}

// Reads and writes as many bytes as asked for, up to multiples of 16.
void queue_traffic_kernel(const Traffic& traffic, const TrafficShape& shape, Stream stream) {
  const auto words = [](uint64_t size_bytes) {
    return static_cast<int64_t>((size_bytes + sizeof(uint4) - 1) / sizeof(uint4));
  };
  const int64_t from_words = words(traffic.read_bytes);
  const int64_t to_words = words(traffic.write_bytes);
  TrafficParams params{.from = reinterpret_cast<const uint4*>(traffic.from),
                       .to = reinterpret_cast<uint4*>(traffic.to),
                       .exchange = reinterpret_cast<uint4*>(traffic.exchange),
                       .from_words = from_words,
                       .to_words = to_words,
                       .reads = from_words + words(traffic.exchange_read_bytes),
                       .writes = to_words + words(traffic.exchange_write_bytes),
                       .reads_per_cta = 0,
                       .writes_per_cta = 0};
  const int64_t most = std::max({params.reads, params.writes, int64_t{1}});
  const int64_t ctas = ceil_quotient(most, static_cast<int64_t>(shape.threads) * shape.vectors);
  params.reads_per_cta = static_cast<int>(ceil_quotient(params.reads, ctas));
  params.writes_per_cta = static_cast<int>(ceil_quotient(params.writes, ctas));
  if (shape.vectors == 1) launch_traffic<1>(params, ctas, shape.threads, stream);
  if (shape.vectors == 2) launch_traffic<2>(params, ctas, shape.threads, stream);
  if (shape.vectors == 4) launch_traffic<4>(params, ctas, shape.threads, stream);
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
  // Portable code has none, and its traffic is judged without.
  facts.has_programmatic_launch =
      gpu_info().at(static_cast<size_t>(index)).architecture.ends_with('a');
  return facts;
}

class Graph {
 public:
  // Captures what `queue` queues on the stream. Captures of other threads go on.
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
      cudaGetLastError();  // The broken capture's error must not show up in a later check.
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
  // A device that failed before has been reported.
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
    const uint64_t size_bytes = traffic.read_bytes + traffic.write_bytes +
                                traffic.exchange_read_bytes + traffic.exchange_write_bytes;
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
