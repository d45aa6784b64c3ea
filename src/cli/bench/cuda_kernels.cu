// See cuda_kernels.h. Traffic is the floor that short operations are judged against: 16-byte
// loads, then 16-byte stores that depend on them, one-shot grids, the same waiting and triggering
// for programmatic launches as the library's kernels have.
#include <algorithm>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <string>

#include "cli/bench/cuda_kernels.h"
#include "narrowfloat/error.h"

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

// random_word_bits() of cli/random_words.h, on the device.
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
  int64_t reads;  // Words of 16 bytes: in all, and of a block.
  int64_t writes;
  int reads_per_block;
  int writes_per_block;
};

template <int kVectors>
__global__ void move_words_kernel(TrafficParams params) {
  cudaGridDependencySynchronize();
  const int64_t read_begin = static_cast<int64_t>(blockIdx.x) * params.reads_per_block;
  const int64_t reads =
      min(static_cast<int64_t>(params.reads_per_block), params.reads - read_begin);
  uint4 words[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = i * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
    words[i] = at < reads ? params.from[read_begin + at] : make_uint4(0, 0, 0, 0);
  }
  cudaTriggerProgrammaticLaunchCompletion();
  uint4 sum = words[0];
#pragma unroll
  for (int i = 1; i < kVectors; ++i) {
    sum =
        make_uint4(sum.x ^ words[i].x, sum.y ^ words[i].y, sum.z ^ words[i].z, sum.w ^ words[i].w);
  }
  const int64_t write_begin = static_cast<int64_t>(blockIdx.x) * params.writes_per_block;
  const int64_t writes =
      min(static_cast<int64_t>(params.writes_per_block), params.writes - write_begin);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = i * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
    if (at < writes) params.to[write_begin + at] = sum;
  }
  // Nothing is written: the loads must stay all the same. Random data never has this value.
  if (params.writes == 0 && sum.x == 0x6E66 && sum.y == 0x6E66 && sum.z == 0x6E66) *params.to = sum;
}

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // Reported here: it must not show up in a later check.
  throw Error(ErrorKind::kDevice, std::string(what) + ": " + cudaGetErrorString(status));
}

int64_t ceil_quotient(int64_t a, int64_t b) { return (a + b - 1) / b; }

unsigned grid_of(int64_t count) {
  constexpr int64_t kMaxBlocks = 4096;
  return static_cast<unsigned>(std::clamp<int64_t>(ceil_quotient(count, kThreads), 1, kMaxBlocks));
}

template <typename Element>
void launch_fill(std::byte* to, int64_t first, int64_t count, cudaStream_t stream) {
  fill_normal_kernel<<<grid_of(count), kThreads, 0, stream>>>(reinterpret_cast<Element*>(to), first,
                                                              count);
  check(cudaGetLastError(), "fill_normal_kernel");
}

template <int kVectors>
void launch_traffic(const TrafficParams& params, int64_t blocks, int threads, Stream stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = static_cast<cudaStream_t>(stream.handle);
  config.attrs = &attribute;
  config.numAttrs = stream.programmatic_launch ? 1 : 0;
  check(cudaLaunchKernelEx(&config, move_words_kernel<kVectors>, params), "move_words_kernel");
}

}  // namespace

void queue_normal_fill(std::byte* to, DType dtype, int64_t first, int64_t count, void* stream) {
  if (count == 0) return;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (dtype == DType::kBF16) launch_fill<__nv_bfloat16>(to, first, count, cuda_stream);
  if (dtype == DType::kF16) launch_fill<__half>(to, first, count, cuda_stream);
  if (dtype == DType::kF32) launch_fill<float>(to, first, count, cuda_stream);
}

void queue_random_words(std::byte* to, uint64_t size_bytes, const RandomWords& words,
                        void* stream) {
  const auto count = static_cast<int64_t>(size_bytes / sizeof(uint64_t));
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (count > 0) {
    random_words_kernel<<<grid_of(count), kThreads, 0, cuda_stream>>>(
        reinterpret_cast<uint64_t*>(to), count, words);
    check(cudaGetLastError(), "random_words_kernel");
  }
  const uint64_t rest = size_bytes % sizeof(uint64_t);
  if (rest == 0) return;
  const auto last = static_cast<uint64_t>(count);
  const uint64_t word = (random_word_bits(words.seed, last) & words.mask) + words.base;
  // Pageable memory: the copy has taken it when the call returns.
  check(cudaMemcpyAsync(to + last * sizeof(word), &word, rest, cudaMemcpyHostToDevice, cuda_stream),
        "cudaMemcpyAsync");
}

void queue_comparison(const std::byte* a, const std::byte* b, uint64_t size_bytes, int* flag,
                      void* stream) {
  const auto count = static_cast<int64_t>(size_bytes / sizeof(uint4));
  if (count == 0) return;
  compare_words_kernel<<<grid_of(count), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      reinterpret_cast<const uint4*>(a), reinterpret_cast<const uint4*>(b), count, flag);
  check(cudaGetLastError(), "compare_words_kernel");
}

void queue_traffic_kernel(const Traffic& traffic, const TrafficShape& shape, Stream stream) {
  const auto words = [](uint64_t size_bytes) {
    return static_cast<int64_t>((size_bytes + sizeof(uint4) - 1) / sizeof(uint4));
  };
  TrafficParams params{.from = reinterpret_cast<const uint4*>(traffic.from),
                       .to = reinterpret_cast<uint4*>(traffic.to),
                       .reads = words(traffic.read_bytes),
                       .writes = words(traffic.write_bytes),
                       .reads_per_block = 0,
                       .writes_per_block = 0};
  const int64_t most = std::max({params.reads, params.writes, int64_t{1}});
  const int64_t blocks = ceil_quotient(most, static_cast<int64_t>(shape.threads) * shape.vectors);
  params.reads_per_block = static_cast<int>(ceil_quotient(params.reads, blocks));
  params.writes_per_block = static_cast<int>(ceil_quotient(params.writes, blocks));
  if (shape.vectors == 1) launch_traffic<1>(params, blocks, shape.threads, stream);
  if (shape.vectors == 2) launch_traffic<2>(params, blocks, shape.threads, stream);
  if (shape.vectors == 4) launch_traffic<4>(params, blocks, shape.threads, stream);
}

}  // namespace narrowfloat::cli
