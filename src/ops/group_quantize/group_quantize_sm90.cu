// sm90_lanes: 8-bit codes with one F32 scale per group of columns (spec 6.9). It is bound by
// memory.
//
// 1 to 32 neighbouring lanes share a group. In groups of multiples of 16 columns a lane holds 16
// elements in registers and stores their codes as 16 bytes; only groups above 512 columns are read
// twice. In other groups a warp processes the elements one by one. Shuffles take the maximum over
// the lanes; the first lane stores the scale, and in the last row the zeros after it.
//
// Bytes per element: 2 or 4 read, 1 written, 4 / group_size of scales. A division by a power of two
// is a multiplication by its reciprocal: both round the same number once.
#include <algorithm>
#include <cuda_runtime.h>

#include "base/fast_division.h"
#include "base/int_math.h"
#include "device/elements.cuh"
#include "device/ptx/convert.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/reduce.cuh"
#include "formats/float16.h"
#include "ops/group_quantize/group_quantize_problem.h"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/launch.h"

namespace narrowfloat {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kPiece = 16;  // Elements per lane.
constexpr int64_t kMaxThreadsPerLaunch = INT32_MAX - kThreads;

struct GroupParams {
  const uint8_t* input = nullptr;
  uint8_t* values = nullptr;
  float* scales = nullptr;
  int64_t input_row_bytes = 0;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t group_size = 0;
  int64_t scale_row_step = 0;
  int64_t scale_group_step = 0;
  int64_t padding_rows = 0;  // Rows after the last one.
  int64_t first_row = 0;     // First row of this launch.
  FastDivisor groups_per_row;
  uint32_t num_groups = 0;  // Groups of this launch.
  uint32_t lanes_log2 = 0;  // Lanes per group.
  float eps = 0.0F;
  float largest = 0.0F;
  DType input_type = DType::kBF16;
  DType output_type = DType::kF8E4M3;
  bool is_power_of_two = false;
  bool divides = false;
};

// A group and this thread's lane in it.
struct Group {
  const uint8_t* input = nullptr;
  uint8_t* values = nullptr;
  int64_t row = 0;
  uint32_t index = 0;  // Index in the row.
  int64_t size = 0;    // 0: no group is left for these lanes.
  int64_t lane = 0;
};

__device__ Group assign_group(const GroupParams& params, int64_t element_bytes) {
  const uint32_t thread = blockIdx.x * kThreads + threadIdx.x;
  const uint32_t group_of_launch = thread >> params.lanes_log2;
  Group group;
  group.lane = thread & ((1U << params.lanes_log2) - 1);
  if (group_of_launch >= params.num_groups) return group;
  const uint32_t row_of_launch = params.groups_per_row.quotient(group_of_launch);
  group.row = params.first_row + row_of_launch;
  group.index = group_of_launch - row_of_launch * params.groups_per_row.divisor();
  group.size = params.group_size;
  const int64_t col = group.index * params.group_size;
  group.input = params.input + group.row * params.input_row_bytes + col * element_bytes;
  group.values = params.values + group.row * params.cols + col;
  return group;
}

// The maximum over the lanes of the group, with NaN as zero. All lanes of the warp take part.
__device__ float lanes_max(uint32_t magnitude, uint32_t lanes_log2) {
  uint32_t value = magnitude > kInfinityBits ? 0U : magnitude;
  for (uint32_t distance = (1U << lanes_log2) / 2; distance > 0; distance /= 2) {
    value = max(value, __shfl_xor_sync(kFullWarp, value, distance));
  }
  return bits_float(value);
}

__device__ void store_scale(const GroupParams& params, const Group& group, float scale) {
  if (group.lane != 0 || group.size == 0) return;
  float* global_scale =
      params.scales + group.row * params.scale_row_step + group.index * params.scale_group_step;
  *global_scale = scale;
  if (group.row != params.rows - 1) return;
  for (int64_t i = 1; i <= params.padding_rows; ++i) global_scale[i * params.scale_row_step] = 0.0F;
}

// Encodes the elements of one group.
struct Encoder {
  float factor;  // Multiplier or divisor.
  bool divides;
  DType type;

  __device__ float scaled(float x) const {
    return divides ? __fdiv_rn(x, factor) : __fmul_rn(x, factor);
  }
  // Packs the codes of four elements in a word.
  __device__ uint32_t word(float a, float b, float c, float d) const {
    a = scaled(a);
    b = scaled(b);
    c = scaled(c);
    d = scaled(d);
    if (type == DType::kF8E4M3) return to_e4m3x4(a, b, c, d);
    return byte(a) | byte(b) << 8 | byte(c) << 16 | byte(d) << 24;
  }
  // The code of a scaled element.
  __device__ uint32_t byte(float x) const {
    if (type == DType::kF8E4M3) return to_e4m3(x);
    return type == DType::kF8E5M2 ? E5M2::encode(x) : to_int8(x);
  }
};

__device__ Encoder make_encoder(const GroupParams& params, float scale) {
  return {.factor = params.divides ? scale : __frcp_rn(scale),
          .divides = params.divides,
          .type = params.output_type};
}

template <class Elements>
__device__ void store_codes(const Elements& x, const Encoder& encoder, uint8_t* global_values) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = encoder.word(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
  }
  store(global_values, uint4{words[0], words[1], words[2], words[3]});
}

template <class Elements>
__global__ void __launch_bounds__(kThreads)
    quantize_pieces_kernel(const __grid_constant__ GroupParams params) {
  const Group group = assign_group(params, Elements::kBytes / kPiece);
  const int64_t first = group.lane * kPiece;
  const int64_t step = kPiece << params.lanes_log2;
  wait_for_previous_grids();
  Elements held = {};
  if (first < group.size) {
    held = load_elements<Elements>(group.input + group.lane * Elements::kBytes);
  }
  uint32_t largest = held.max_number();
  largest = largest > kInfinityBits ? 0U : largest;
  for (int64_t at = first + step; at < group.size; at += step) {
    const auto x = load_elements<Elements>(group.input + at / kPiece * Elements::kBytes);
    const uint32_t magnitude = x.max_number();
    largest = max(largest, magnitude > kInfinityBits ? 0U : magnitude);
  }
  trigger_dependent_launch();
  const float amax = lanes_max(largest, params.lanes_log2);
  const float scale = group_scale_of(amax, params.eps, params.largest, params.is_power_of_two);
  store_scale(params, group, scale);
  const Encoder encoder = make_encoder(params, scale);
  if (first < group.size) store_codes(held, encoder, group.values + first);
  for (int64_t at = first + step; at < group.size; at += step) {
    const auto x = load_elements<Elements>(group.input + at / kPiece * Elements::kBytes);
    store_codes(x, encoder, group.values + at);
  }
}

__device__ float load_element(const GroupParams& params, const Group& group, int64_t i) {
  if (params.input_type == DType::kF32) return load_readonly<float>(group.input + 4 * i);
  const auto half = load_readonly<uint16_t>(group.input + 2 * i);
  return params.input_type == DType::kBF16 ? bf16_to_float(half) : f16_to_float(half);
}

// Quantizes groups of any size, one per warp.
__global__ void __launch_bounds__(kThreads)
    quantize_elements_kernel(const __grid_constant__ GroupParams params) {
  const Group group = assign_group(params, params.input_type == DType::kF32 ? 4 : 2);
  wait_for_previous_grids();
  uint32_t largest = 0;
  for (int64_t i = group.lane; i < group.size; i += kWarpSize) {
    const uint32_t magnitude = float_bits(load_element(params, group, i)) & 0x7FFFFFFFU;
    largest = max(largest, magnitude > kInfinityBits ? 0U : magnitude);
  }
  trigger_dependent_launch();
  const float amax = lanes_max(largest, params.lanes_log2);
  const float scale = group_scale_of(amax, params.eps, params.largest, params.is_power_of_two);
  store_scale(params, group, scale);
  const Encoder encoder = make_encoder(params, scale);
  for (int64_t i = group.lane; i < group.size; i += kWarpSize) {
    const float x = encoder.scaled(load_element(params, group, i));
    group.values[i] = static_cast<uint8_t>(encoder.byte(x));
  }
}

bool has_pieces(const GroupQuantizeProblem& problem) { return problem.group_size % kPiece == 0; }

uint32_t lanes_log2(const GroupQuantizeProblem& problem) {
  if (!has_pieces(problem)) return 5;
  uint32_t log2 = 0;
  while (log2 < 5 && (kPiece << log2) < problem.group_size) ++log2;
  return log2;
}

GroupParams make_params(const GroupQuantizeProblem& problem, const GroupQuantizeArgs& args) {
  const bool is_row_major = problem.scale_order == GroupScaleOrder::kRowMajor;
  const int64_t groups = problem.cols / problem.group_size;
  GroupParams params;
  params.input = static_cast<const uint8_t*>(args.input);
  params.values = args.values;
  params.scales = args.scales;
  params.input_row_bytes = args.input_stride * (bits(problem.input) / 8);
  params.rows = problem.rows;
  params.cols = problem.cols;
  params.group_size = problem.group_size;
  params.scale_row_step = is_row_major ? groups : 1;
  params.scale_group_step = is_row_major ? 1 : args.scale_rows;
  params.padding_rows = is_row_major ? 0 : args.scale_rows - problem.rows;
  params.groups_per_row = FastDivisor(static_cast<uint32_t>(groups));
  params.lanes_log2 = lanes_log2(problem);
  params.eps = args.eps;
  params.largest = largest_code(problem.output);
  params.input_type = problem.input;
  params.output_type = problem.output;
  params.is_power_of_two = problem.power_of_two_scales;
  params.divides = !is_row_major && !problem.power_of_two_scales;
  return params;
}

using Kernel = void (*)(GroupParams);

Kernel kernel_for(const GroupQuantizeProblem& problem) {
  if (!has_pieces(problem)) return quantize_elements_kernel;
  if (problem.input == DType::kF32) return quantize_pieces_kernel<FloatElements<kPiece>>;
  return problem.input == DType::kBF16 ? quantize_pieces_kernel<PackedElements<PackedBf16, kPiece>>
                                       : quantize_pieces_kernel<PackedElements<PackedF16, kPiece>>;
}

void launch_quantize_groups(const GroupQuantizeProblem& problem, const GroupQuantizeArgs& args,
                            Stream stream) {
  if (problem.rows == 0 || problem.cols == 0) return;
  const CudaDeviceScope scope(problem.device);
  GroupParams params = make_params(problem, args);
  const int64_t groups = problem.cols / problem.group_size;
  const int64_t rows_per_launch = (kMaxThreadsPerLaunch >> params.lanes_log2) / groups;
  for (int64_t first = 0; first < problem.rows; first += rows_per_launch) {
    const int64_t num_groups = std::min(problem.rows - first, rows_per_launch) * groups;
    params.first_row = first;
    params.num_groups = static_cast<uint32_t>(num_groups);
    const auto blocks = static_cast<unsigned>(ceil_div(num_groups << params.lanes_log2, kThreads));
    launch(kernel_for(problem), {dim3(blocks), dim3(kThreads)}, stream, params);
  }
}

Support supports(const GroupQuantizeProblem& problem) {
  if (problem.cols / problem.group_size > (kMaxThreadsPerLaunch >> 5)) {
    return Support::no("more than 2^26 groups in a row");
  }
  return Support::yes();
}

}  // namespace

const GroupQuantizeImpl kGroupQuantizeSm90{"sm90_lanes", on_own_code<supports>,
                                           launch_quantize_groups};
const GroupQuantizeImpl kGroupQuantizeSm80{"sm80_lanes", on_portable_code<supports>,
                                           launch_quantize_groups};

}  // namespace narrowfloat
