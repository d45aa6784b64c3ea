// sm90_words: scales of one layout written in another (spec 8.2), padding zero.
//
// A thread makes 16 consecutive bytes of the output: the output layout's place() finds the rows and
// blocks of its scales, and the input layout's offset() finds their addresses. Four one-byte scales
// that start at a multiple of four blocks are neighbours in every byte layout, so they move as one
// word, and the four words of a thread are a constant step apart: place() divides once. Only a
// linear output whose rows are no multiple of 16 bytes is located word by word or scale by scale.
//
// Bytes: input and output, once. Index arithmetic is 64-bit: more than 2^31 scales work.
#include <cuda_runtime.h>

#include "base/int_math.h"
#include "device/ptx/grid_dependency.cuh"
#include "device/vector_io.cuh"
#include "ops/relayout/relayout_problem.h"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/launch.h"
#include "tensor/layouts/registry.h"

namespace narrowfloat {
namespace {

constexpr int kThreads = 256;
constexpr int kWords = 4;  // Words of 4 bytes per thread.

struct RelayoutParams {
  const void* input = nullptr;  // [batch][input_scales]
  void* output = nullptr;
  int64_t input_scales = 0;  // Scales per batch.
  int64_t output_scales = 0;
  int64_t num_outputs = 0;  // Scales of all batches of the output.
  ScaleExtents extents;     // Logical.
  ScaleLayoutId from = ScaleLayoutId::kLinear;
  ScaleLayoutId to = ScaleLayoutId::kLinear;
  // Step between the four words of a thread, if it is constant within a batch.
  bool has_word_step = false;
  ScalePlace word_step;
  bool moves_words = false;    // The scales of an output word are neighbours in the input,
  bool aligned_words = false;  // and start at a multiple of 4 bytes there.
};

// The batch, row and block of a position of the output.
struct Target {
  int64_t batch = 0;
  ScalePlace place;
};

__device__ Target find_target(const RelayoutParams& params, int64_t position) {
  Target target;
  if (position >= params.output_scales) target.batch = position / params.output_scales;
  target.place =
      AllLayouts::place(params.to, position - target.batch * params.output_scales, params.extents);
  return target;
}

// The scale of `target` and, for one-byte scales, the next three of the row, as a word; 0 in the
// padding.
template <typename Stored>
__device__ uint32_t load_scales(const RelayoutParams& params, const Target& target, int count) {
  const ScalePlace& place = target.place;
  if (place.row >= params.extents.rows || place.block >= params.extents.blocks) return 0;
  const Stored* first = static_cast<const Stored*>(params.input) +
                        target.batch * params.input_scales +
                        AllLayouts::offset(params.from, place.row, place.block, params.extents);
  if constexpr (sizeof(Stored) == sizeof(uint32_t)) {
    return load_readonly<Stored>(first);
  } else {
    const int64_t left = params.extents.blocks - place.block;
    if (count == 4 && left >= 4 && params.aligned_words) return load_readonly<uint32_t>(first);
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < count && i < left) word |= uint32_t{load_readonly<Stored>(first + i)} << (8 * i);
    }
    return word;
  }
}

template <typename Stored>
__device__ void load_stepped(const RelayoutParams& params, int64_t first, uint32_t* words) {
  Target target = find_target(params, first);
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    words[i] = load_scales<Stored>(params, target, 4);
    target.place.row += params.word_step.row;
    target.place.block += params.word_step.block;
  }
}

// A word of a linear output whose rows are no multiple of 16 bytes.
template <typename Stored>
__device__ uint32_t load_linear(const RelayoutParams& params, int64_t position) {
  const int count = params.moves_words ? 4 / static_cast<int>(sizeof(Stored)) : 1;
  uint32_t word = 0;
#pragma unroll 1
  for (int i = 0; i < 4 / static_cast<int>(sizeof(Stored)); i += count) {
    if (position + i >= params.num_outputs) break;
    const Target target = find_target(params, position + i);
    word |= load_scales<Stored>(params, target, count) << (8 * i);
  }
  return word;
}

template <typename Stored>
__global__ void __launch_bounds__(kThreads)
    move_scales_kernel(const __grid_constant__ RelayoutParams params) {
  constexpr int64_t kPerWord = sizeof(uint32_t) / sizeof(Stored);
  const int64_t first = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * (kWords * kPerWord);
  if (first >= params.num_outputs) return;
  wait_for_previous_grids();
  uint32_t words[kWords];
  if (params.has_word_step) {
    load_stepped<Stored>(params, first, words);
  } else {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = load_linear<Stored>(params, first + i * kPerWord);
  }
  trigger_dependent_launch();
  Stored* global_output = static_cast<Stored*>(params.output) + first;
  if (first + kWords * kPerWord <= params.num_outputs) {
    store(global_output, uint4{words[0], words[1], words[2], words[3]});
    return;
  }
  // The last scales of a linear output.
#pragma unroll
  for (int i = 0; i < kWords * kPerWord; ++i) {
    if (first + i < params.num_outputs) {
      const uint32_t word = words[i / kPerWord];
      global_output[i] = static_cast<Stored>(word >> (8 * sizeof(Stored) * (i % kPerWord)));
    }
  }
}

RelayoutParams make_params(const RelayoutProblem& problem, const RelayoutArgs& args) {
  const bool to_linear = problem.to == ScaleLayoutId::kLinear;
  const int64_t scale_bytes = problem.type == ScaleType::kF32 ? 4 : 1;
  // Extents so large that the first scales stay inside.
  constexpr ScaleExtents kLarge{4096, 4096};
  return {.input = args.input,
          .output = args.output,
          .input_scales = args.input_scales,
          .output_scales = args.output_scales,
          .num_outputs = problem.batch * args.output_scales,
          .extents = {problem.rows, problem.blocks},
          .from = problem.from,
          .to = problem.to,
          .has_word_step = !to_linear || problem.blocks * scale_bytes % 16 == 0,
          .word_step = AllLayouts::place(problem.to, 4 / scale_bytes, kLarge),
          .moves_words = !to_linear || problem.blocks % 4 == 0,
          .aligned_words = problem.from != ScaleLayoutId::kLinear || problem.blocks % 4 == 0};
}

void launch_move_scales(const RelayoutProblem& problem, const RelayoutArgs& args, Stream stream) {
  const CudaDeviceScope scope(problem.device);
  const RelayoutParams params = make_params(problem, args);
  const bool is_f32 = problem.type == ScaleType::kF32;
  const int64_t threads = ceil_div(params.num_outputs, is_f32 ? kWords : 4 * kWords);
  const LaunchShape shape{dim3(static_cast<unsigned>(ceil_div(threads, kThreads))), dim3(kThreads)};
  if (is_f32) {
    launch(move_scales_kernel<uint32_t>, shape, stream, params);
  } else {
    launch(move_scales_kernel<uint8_t>, shape, stream, params);
  }
}

Support supports(const RelayoutProblem& /*problem*/) { return Support::yes(); }

}  // namespace

const RelayoutImpl kRelayoutSm90{"sm90_words", on_own_code<supports>, launch_move_scales};
const RelayoutImpl kRelayoutSm80{"sm80_words", on_portable_code<supports>, launch_move_scales};

}  // namespace narrowfloat
