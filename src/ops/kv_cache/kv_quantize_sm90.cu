// sm90_blocks: NVFP4 blocks of rows, of appended tokens and of whole caches (spec 6.11). It is
// bound by memory.
//
// A thread quantizes one block: two 16-byte loads, eight bytes of codes, one scale. Neighbouring
// threads are neighbours in a row, then in the heads, so that a warp's loads and stores are
// contiguous where the tensors are. blockIdx.y selects keys or values of one launch. The formulas
// of a block and the lookup of a row's place are branches that all threads take the same way;
// appended rows without a place are skipped. Blocks in the normal range take the fast path to their
// codes (device/encode_e2m1.cuh), others the general path, out of line.
//
// Bytes per element: 2 read, 0.5625 written. A cache without an encode scale is read once more
// before, for its maximum, which is stored at the place of the decode scale.
#include <array>
#include <cuda_runtime.h>

#include "device/device_math.cuh"
#include "device/encode_e2m1.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/reduce.cuh"
#include "ops/kv_cache/kv_launch.cuh"
#include "ops/kv_cache/kv_problem.h"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/fast_math.h"

namespace narrowfloat {
namespace {

constexpr int kBlock = static_cast<int>(kKvBlock);

struct KvSideParams {
  const uint8_t* input = nullptr;
  KvStrides input_steps;
  uint8_t* values = nullptr;
  KvStrides value_steps;
  uint8_t* scales = nullptr;
  KvStrides scale_steps;
  KvFactor factor;
  float* decode_scale = nullptr;
  bool reorders_scales = false;
};

struct KvQuantizeParams {
  KvSideParams sides[kKvSides];
  KvAxes axes[kKvSides];
  KvTargets targets;
  int64_t first_i = 0;
  KvRule rule = KvRule::kQuantize;
  bool looks_up = false;
  bool has_heads_first = false;
};

// The destination of a block.
struct KvBlockTarget {
  uint8_t* codes = nullptr;  // Null: none.
  uint8_t* scale = nullptr;
};

__device__ KvBlockTarget find_target(const KvQuantizeParams& params, const KvSideParams& side,
                                     const KvAxes& axes, const KvPlace& place) {
  int64_t i = place.i;
  int64_t j = place.j;
  int64_t k = place.k;
  if (params.looks_up) {
    const KvEntry entry = params.targets.find(i);
    if (entry.page < 0) return {};
    i = entry.page;
    j = entry.entry;
  }
  uint8_t* codes = side.values + side.value_steps.offset(i, j, k) + place.piece * (kBlock / 2);
  int64_t position = place.piece;
  if (side.reorders_scales) {
    const int64_t token = params.has_heads_first ? k : j;
    const KvScalePlace moved = reordered_v_scale(token, place.piece, axes.pieces.divisor());
    j = params.has_heads_first ? j : moved.token;
    k = params.has_heads_first ? moved.token : k;
    position = moved.position;
  }
  return {codes, side.scales + side.scale_steps.offset(i, j, k) + position};
}

// The general path for any block: blocks with NaN, infinities or multipliers outside the normal
// range.
template <class Math, class Elements>
__device__ __noinline__ uint2 general_codes(Elements elements, KvRule rule, float multiplier) {
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    words[i / 8] |= uint32_t{kv_code<Math>(rule, elements[i], multiplier)} << (i % 8 * 4);
  }
  return {words[0], words[1]};
}

template <class Math, class Elements>
__device__ uint2 block_codes(const Elements& elements, KvRule rule, float multiplier) {
  // In this range the multiplier times the fast path's factor is a normal number.
  const bool takes_fast_path =
      multiplier == 0.0F || (multiplier >= 0x1p-90F && multiplier <= 0x1p90F);
  const float prescaled = multiplier * kE2m1Prescale;
  // NaN gives false.
  const bool is_in_range = Math::mul(bits_float(elements.max_or_nan()), prescaled) < kE2m1FastLimit;
  if (!takes_fast_path || !is_in_range) return general_codes<Math>(elements, rule, multiplier);
  return {encode_e2m1_in_range<Math>(elements, 0, prescaled),
          encode_e2m1_in_range<Math>(elements, 8, prescaled)};
}

template <class Half, class Math>
__global__ void __launch_bounds__(kKvThreads)
    quantize_blocks_kernel(const __grid_constant__ KvQuantizeParams params) {
  using Elements = PackedElements<Half, kBlock>;
  const KvSideParams& side = params.sides[blockIdx.y];
  const KvAxes& axes = params.axes[blockIdx.y];
  const uint32_t thread = blockIdx.x * kKvThreads + threadIdx.x;
  if (thread >= axes.num_threads) return;
  const KvPlace place = kv_place(axes, params.first_i, thread);
  wait_for_previous_grids();
  const KvBlockTarget target = find_target(params, side, axes, place);
  if (target.codes == nullptr) return;
  const auto elements =
      load_elements<Elements>(side.input + side.input_steps.offset(place.i, place.j, place.k) +
                              place.piece * int64_t{Elements::kBytes});
  const float factor = side.factor.get();
  trigger_dependent_launch();
  const float amax = bits_float(elements.max_number());
  const BlockScale<uint8_t> block = kv_block_scale<Math>(params.rule, amax, factor);
  store(target.codes, block_codes<Math>(elements, params.rule, block.multiplier));
  *target.scale = block.stored;
}

// One thread per side, after the last block has used the maximum.
__global__ void __launch_bounds__(kWarpSize)
    store_decode_scales_kernel(const __grid_constant__ KvQuantizeParams params) {
  if (threadIdx.x >= kKvSides) return;
  const KvSideParams& side = params.sides[threadIdx.x];
  wait_for_previous_grids();
  const float encode_scale = side.factor.get();
  trigger_dependent_launch();
  *side.decode_scale = canonical_nan(div_rn(1.0F, encode_scale));
}

KvQuantizeParams make_params(const KvQuantizeProblem& problem, const KvQuantizeArgs& args) {
  KvQuantizeParams params;
  for (size_t i = 0; i < kKvSides; ++i) {
    const KvQuantizeSide& from = args.sides[i];
    KvSideParams& side = params.sides[i];
    side.input = from.input;
    side.values = from.values;
    side.scales = from.scales;
    side.factor = from.factor;
    side.decode_scale = from.decode_scale;
    side.reorders_scales = from.reorders_scales;
    side.input_steps = KvStrides(from.input_steps);
    side.value_steps = KvStrides(from.value_steps);
    side.scale_steps = KvStrides(from.scale_steps);
  }
  params.targets = args.targets;
  params.rule = problem.rule;
  params.looks_up = problem.looks_up;
  params.has_heads_first = problem.has_heads_first;
  return params;
}

using Kernel = void (*)(KvQuantizeParams);

template <class Half>
Kernel kernel_for(MathMode math) {
  return math == MathMode::kExact ? quantize_blocks_kernel<Half, DeviceExactMath>
                                  : quantize_blocks_kernel<Half, DeviceFastMath>;
}

void launch_kv_quantize(const KvQuantizeProblem& problem, const KvQuantizeArgs& args,
                        Stream stream) {
  const CudaDeviceScope scope(problem.device);
  const KvQuantizeParams params = make_params(problem, args);
  const Kernel kernel = problem.input == DType::kBF16 ? kernel_for<PackedBf16>(problem.math)
                                                      : kernel_for<PackedF16>(problem.math);
  launch_kv(kernel, params, problem.extents, problem.blocks, stream);
  if (args.sides[0].decode_scale == nullptr) return;
  launch(store_decode_scales_kernel, {dim3(1), dim3(kWarpSize)}, stream, params);
}

Support supports(const KvQuantizeProblem& problem) {
  Support fits = kv_fits(problem.extents, problem.blocks);
  if (!fits.ok() || problem.math == MathMode::kExact) return fits;
  return has_fast_math(problem.device);
}

}  // namespace

const KvQuantizeImpl kKvQuantizeSm90{"sm90_blocks", on_own_code<supports>, launch_kv_quantize};
const KvQuantizeImpl kKvQuantizeSm80{"sm80_blocks", on_portable_code<supports>, launch_kv_quantize};

}  // namespace narrowfloat
