// sm90_words: one bit per element, eight a byte. It is bound by reads.
//
// One run: a thread loads 32 elements as two 16-byte vectors and stores their bits as a word; one
// multiplication turns bytes of 0 and 1 into a nibble. Segments: one CTA sums the segments' bytes
// to the output's offsets; then each thread finds the segment of its output byte by bisection and
// loads its up to eight elements one by one (neighbouring threads read neighbouring elements, from
// a line that is in L1).
//
// Bytes per element: 1 read, 1/8 written. Offsets in device memory are not validated: segments are
// clamped to the input and stores to the output.
#include <cuda_runtime.h>

#include "base/int_math.h"
#include "device/ptx/grid_dependency.cuh"
#include "device/scan.cuh"
#include "device/vector_io.cuh"
#include "ops/pack_bits/pack_bits_problem.h"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/launch.h"

namespace narrowfloat {
namespace {

constexpr int kThreads = 256;
constexpr int kScanThreads = 1024;
constexpr int64_t kThreadElements = 32;

struct PackParams {
  const uint8_t* input = nullptr;
  uint8_t* output = nullptr;
  int64_t elements = 0;
  int64_t output_bytes = 0;  // Bytes that may be written.
  Indices offsets;           // [segments + 1]
  void* output_offsets = nullptr;
  int64_t segments = 0;
  bool is_big = false;
};

// Bit i: whether byte i of the word is not zero.
__device__ uint32_t nibble_of(uint32_t bytes) {
  const uint32_t ones = __vcmpne4(bytes, 0) & 0x01010101U;
  // Byte i's bit arrives at 24 + i; no other two products share a position.
  return ones * 0x01020408U >> 24;
}

// Puts the bits of each byte into the requested order.
__device__ uint32_t ordered(uint32_t bits, bool is_big) {
  return is_big ? __byte_perm(__brev(bits), 0, 0x0123) : bits;
}

__device__ uint32_t bits_of_vector(const uint4& v) {
  return nibble_of(v.x) | nibble_of(v.y) << 4 | nibble_of(v.z) << 8 | nibble_of(v.w) << 12;
}

// Bits of up to eight elements at `first`, loaded one by one.
__device__ uint32_t bits_of_elements(const uint8_t* first, int64_t count) {
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < count && load_readonly<uint8_t>(first + i) != 0) bits |= 1U << i;
  }
  return bits;
}

__global__ void __launch_bounds__(kThreads)
    pack_run_kernel(const __grid_constant__ PackParams params) {
  const int64_t first = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kThreadElements;
  if (first >= params.elements) return;
  const uint8_t* global_first = params.input + first;
  uint8_t* global_bytes = params.output + first / 8;
  wait_for_previous_grids();
  const int64_t left = params.elements - first;
  if (left >= kThreadElements) {
    const auto low = load_readonly<uint4>(global_first);
    const auto high = load_readonly<uint4>(global_first + 16);
    trigger_dependent_launch();
    store(global_bytes, ordered(bits_of_vector(low) | bits_of_vector(high) << 16, params.is_big));
    return;
  }
  for (int64_t i = 0; i < ceil_div(left, 8); ++i) {
    const uint32_t bits = bits_of_elements(global_first + 8 * i, left - 8 * i);
    global_bytes[i] = static_cast<uint8_t>(ordered(bits, params.is_big));
  }
}

struct Segment {
  int64_t begin;
  int64_t end;
};

__device__ Segment clamped_segment(const PackParams& params, int64_t index) {
  const int64_t begin = min(max(params.offsets[index], int64_t{0}), params.elements);
  const int64_t end = min(max(params.offsets[index + 1], begin), params.elements);
  return {begin, end};
}

__device__ void store_offset(const PackParams& params, int64_t index, int64_t value) {
  if (params.offsets.is_wide) {
    static_cast<int64_t*>(params.output_offsets)[index] = value;
  } else {
    static_cast<int32_t*>(params.output_offsets)[index] = static_cast<int32_t>(value);
  }
}

// Launched with one CTA.
__global__ void __launch_bounds__(kScanThreads)
    sum_segments_kernel(const __grid_constant__ PackParams params) {
  __shared__ uint32_t shared_sums[kScanThreads / kWarpSize];
  wait_for_previous_grids();
  int64_t sum = 0;
  if (threadIdx.x == 0) store_offset(params, 0, 0);
  for (int64_t first = 0; first < params.segments; first += kScanThreads) {
    const int64_t index = first + threadIdx.x;
    uint32_t bytes = 0;
    if (index < params.segments) {
      const Segment segment = clamped_segment(params, index);
      bytes = static_cast<uint32_t>(ceil_div(segment.end - segment.begin, 8));
    }
    const BlockSum of_block = block_sum(bytes, shared_sums);
    if (index < params.segments) store_offset(params, index + 1, sum + of_block.before + bytes);
    sum += of_block.total;
    __syncthreads();
  }
  trigger_dependent_launch();
}

// The last segment that starts at or before an output byte.
__device__ int64_t find_segment(const PackParams& params, const Indices& starts, int64_t byte) {
  int64_t low = 0;
  int64_t high = params.segments;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (starts[middle] <= byte) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

__global__ void __launch_bounds__(kThreads)
    pack_segments_kernel(const __grid_constant__ PackParams params) {
  const int64_t byte = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (byte >= params.output_bytes) return;
  wait_for_previous_grids();
  const Indices starts{params.output_offsets, params.offsets.is_wide};
  const int64_t index = find_segment(params, starts, byte);
  const Segment segment = clamped_segment(params, index);
  const int64_t first = segment.begin + 8 * (byte - starts[index]);
  if (first < segment.begin || first >= segment.end) return;
  const uint32_t bits = bits_of_elements(params.input + first, segment.end - first);
  trigger_dependent_launch();
  params.output[byte] = static_cast<uint8_t>(ordered(bits, params.is_big));
}

LaunchShape shape_for(int64_t threads) {
  return {dim3(static_cast<unsigned>(ceil_div(threads, kThreads))), dim3(kThreads)};
}

void launch_pack_bits(const PackBitsProblem& problem, const PackBitsArgs& args, Stream stream) {
  const CudaDeviceScope scope(problem.device);
  const PackParams params{.input = args.input,
                          .output = args.output,
                          .elements = problem.elements,
                          .output_bytes = args.output_bytes,
                          .offsets = args.offsets,
                          .output_offsets = args.output_offsets,
                          .segments = problem.segments,
                          .is_big = problem.order == BitOrder::kBig};
  if (problem.segments < 0) {
    launch(pack_run_kernel, shape_for(ceil_div(problem.elements, kThreadElements)), stream, params);
    return;
  }
  launch(sum_segments_kernel, {dim3(1), dim3(kScanThreads)}, stream, params);
  const int64_t bytes = problem.segments == 0 ? 0 : args.output_bytes;
  launch(pack_segments_kernel, shape_for(bytes), stream, params);
}

Support supports(const PackBitsProblem& problem) {
  // A segment's bytes are summed in 32 bits; a CTA of the grid packs 256 bytes of output.
  constexpr int64_t kMaxElements = int64_t{1} << 33;
  if (problem.elements > kMaxElements || problem.segments > kMaxElements) {
    return Support::no("more than 2^33 elements");
  }
  return Support::yes();
}

}  // namespace

const PackBitsImpl kPackBitsSm90{"sm90_words", on_own_code<supports>, launch_pack_bits};
const PackBitsImpl kPackBitsSm80{"sm80_words", on_portable_code<supports>, launch_pack_bits};

}  // namespace narrowfloat
