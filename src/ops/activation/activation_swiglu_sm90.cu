// sm90_swiglu: SwiGLU of E4M3, BF16 or F32 rows to E4M3 with 1x128 scales, for gate orders with two
// contiguous halves.
//
//   h     = g * rcp(1 + ex2(-log2(e) * alpha * g)) * u      hardware ex2 and rcp (moe spec 6.2)
//   a     = max |h| over 128 columns;  m = RN(448 / a), 1 for a = 0 or infinite
//   code  = E4M3(RN(h * m));           scale = RN(1 / m)                            (spec 6.7)
//
// 8, 16 or 32 lanes compute 128 output columns of one row, each of them 16, 8 or 4 neighbouring
// columns of u, of g and of the output, in one access each. The tasks of groups of lanes are
// (bundle of rows, group of columns). Rows run fastest in a bundle, so that their scales,
// neighbours in [blocks, P], share a sector.
//
// Bytes per row, E4M3: 2 I + I for elements, 3 I / 32 for scales: 3.09 an output. BF16: 5.03, F32:
// 9.03.
// docs/kernels/activation.md has the arithmetic, the predictions and measurements.
#include "base/fast_division.h"
#include "base/int_math.h"
#include "device/ptx/grid_dependency.cuh"
#include "device/reduce.cuh"
#include "device/swiglu.cuh"
#include "ops/activation/activation_math.h"
#include "ops/activation/activation_rows_sm90.cuh"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/launch.h"

namespace narrowfloat {
namespace {

// kLanes share a group of 128 columns. kBundle rows follow each other before the next group of
// columns. At least kMinBlocks CTAs fit on an SM, which bounds the registers. For few rows CTAs are
// small, as they then spread evenly.
template <int kLanesOfGroup, int kBundleRows, int kBlocks>
struct RowTuning {
  static constexpr int kLanes = kLanesOfGroup;
  static constexpr int kBundle = kBundleRows;
  static constexpr int kMinBlocks = kBlocks;
  static constexpr int kThreads = kBundleRows == 1 ? 64 : 128;
};
template <class Input>
using OneTokenTuning = RowTuning<Input::kLanes == 8 ? 16 : Input::kLanes, 1, 1>;
template <class Input>
using FewRowsTuning = RowTuning<Input::kLanes, 1, 1>;
template <class Input>
using ManyRowsTuning = RowTuning<Input::kLanes, 8, 16>;
// Activations with parameters need more registers.
template <class Input>
using GeneralTuning = RowTuning<Input::kLanes, 8, 12>;

struct E4m3Input {
  static constexpr int kLanes = 8;  // A lane loads 16 bytes.
  static constexpr int kPerWord = 4;
  static constexpr bool kHasScales = true;
  __device__ static void widen(uint32_t word, float* out) {
    const uint32_t low = e4m3x4_low_to_f16x2(word);
    const uint32_t high = e4m3x4_high_to_f16x2(word);
    out[0] = f16_low_to_float(low);
    out[1] = f16_high_to_float(low);
    out[2] = f16_low_to_float(high);
    out[3] = f16_high_to_float(high);
  }
};
struct Bf16Input {
  static constexpr int kLanes = 16;
  static constexpr int kPerWord = 2;
  static constexpr bool kHasScales = false;
  __device__ static void widen(uint32_t word, float* out) {
    out[0] = bits_float(word << 16);
    out[1] = bits_float(word & 0xFFFF0000U);
  }
};
struct F32Input {
  static constexpr int kLanes = 32;
  static constexpr int kPerWord = 1;
  static constexpr bool kHasScales = false;
  __device__ static void widen(uint32_t word, float* out) { out[0] = bits_float(word); }
};

struct SwigluParams {
  const uint8_t* input;  // [rows, 2 * inter]
  uint8_t* output;       // [rows, inter]
  ScaleMatrix<const float, uint32_t> input_scales;
  ScaleMatrix<float, uint32_t> output_scales;
  NamedRows named;
  FastDivisor bundle_tasks;  // Tasks of a bundle: groups of columns times kBundle.
  uint32_t inter;
  uint32_t first_up;  // Columns at which the halves start.
  uint32_t first_gate;
  ActivationParams<float> activation;
};

template <int kWords>
struct Words {
  uint32_t word[kWords];
};

// Loads 8 or 16 bytes.
template <int kWords>
__device__ inline Words<kWords> load_words(const uint8_t* address) {
  if constexpr (kWords == 4) return bit_cast<Words<4>>(load_readonly<uint4>(address));
  if constexpr (kWords == 2) return bit_cast<Words<2>>(load_readonly<uint2>(address));
}
template <int kWords>
__device__ inline void store_words(uint8_t* address, const Words<kWords>& words) {
  if constexpr (kWords == 4) store(address, bit_cast<uint4>(words));
  if constexpr (kWords == 2) store(address, bit_cast<uint2>(words));
  if constexpr (kWords == 1) store(address, words.word[0]);
}

template <class Input, class Tuning>
struct Shape {
  static constexpr int kCols = kGroupCols / Tuning::kLanes;  // Columns per thread and row.
  static constexpr int kWords = kCols / Input::kPerWord;
};

// The input of a thread in one row.
template <class Input, class Tuning>
struct Piece {
  Words<Shape<Input, Tuning>::kWords> up;
  Words<Shape<Input, Tuning>::kWords> gate;
  float up_scale;
  float gate_scale;
};

// The entry and columns of a thread.
struct Place {
  uint32_t entry;  // Entry of the map.
  uint32_t group;
  uint32_t col;  // First column of the thread.
};

template <class Tuning>
__device__ inline Place assign_place(const SwigluParams& params) {
  constexpr uint32_t kTasksPerCta = Tuning::kThreads / Tuning::kLanes;
  const uint32_t task = blockIdx.x * kTasksPerCta + threadIdx.x / Tuning::kLanes;
  const uint32_t bundle = params.bundle_tasks.quotient(task);
  const uint32_t in_bundle = task - bundle * params.bundle_tasks.divisor();
  const uint32_t group = in_bundle / Tuning::kBundle;
  const uint32_t lane = threadIdx.x % Tuning::kLanes;
  // Threads after the last task get entries past the end of the map.
  return {.entry = bundle * Tuning::kBundle + in_bundle % Tuning::kBundle,
          .group = group,
          .col = group * kGroupCols + lane * (kGroupCols / Tuning::kLanes)};
}

// The result is zero past the end of a short group.
template <class Input, class Tuning>
__device__ inline Piece<Input, Tuning> load_piece(const SwigluParams& params, uint32_t row,
                                                  uint32_t limit, uint32_t col) {
  Piece<Input, Tuning> piece{};
  if (col >= params.inter) return piece;
  constexpr int kBytes = 4 / Input::kPerWord;
  const uint8_t* const line = params.input + uint64_t{row} * (2 * kBytes * params.inter);
  const uint32_t up_col = params.first_up + col;
  const uint32_t gate_col = params.first_gate + col;
  piece.up = load_words<Shape<Input, Tuning>::kWords>(line + kBytes * up_col);
  piece.gate = load_words<Shape<Input, Tuning>::kWords>(line + kBytes * gate_col);
  if constexpr (Input::kHasScales) {
    const auto scales = params.input_scales.of_rows(params.named, limit);
    piece.up_scale = load_readonly<float>(scales.place(row, up_col / kGroupCols));
    piece.gate_scale = load_readonly<float>(scales.place(row, gate_col / kGroupCols));
  }
  return piece;
}

template <bool kHasParameters>
__device__ inline float activate_pair(float u, float g, const ActivationParams<float>& params) {
  if constexpr (!kHasParameters) return fast_swiglu(u, g);
  return fast_swiglu(u, g, params);
}

template <class Input, class Tuning, bool kHasParameters>
__device__ inline void activate_piece(const Piece<Input, Tuning>& piece,
                                      const ActivationParams<float>& params, float* h) {
  constexpr int kPerWord = Input::kPerWord;
#pragma unroll
  for (int i = 0; i < Shape<Input, Tuning>::kWords; ++i) {
    float up[kPerWord];
    float gate[kPerWord];
    Input::widen(piece.up.word[i], up);
    Input::widen(piece.gate.word[i], gate);
#pragma unroll
    for (int j = 0; j < kPerWord; ++j) {
      if constexpr (Input::kHasScales) {
        up[j] = __fmul_rn(up[j], piece.up_scale);
        gate[j] = __fmul_rn(gate[j], piece.gate_scale);
      }
      h[i * kPerWord + j] = activate_pair<kHasParameters>(up[j], gate[j], params);
    }
  }
}

// The maximum over the lanes of a group; numbers win over NaN.
template <class Tuning>
__device__ inline float group_amax(const float* h) {
  float amax = 0.0F;
#pragma unroll
  for (int i = 0; i < kGroupCols / Tuning::kLanes; ++i) amax = fmaxf(amax, fabsf(h[i]));
  return bits_float(group_max<Tuning::kLanes>(float_bits(amax)));
}

// The destination of a thread's results.
struct Target {
  uint32_t row;
  uint32_t limit;  // Limit of all rows.
  uint32_t group;
  uint32_t col;
};

template <class Tuning>
__device__ inline void store_scaled(const SwigluParams& params, const Target& target,
                                    const float* h, const BlockScale<float>& scale) {
  constexpr int kWords = kGroupCols / Tuning::kLanes / 4;
  Words<kWords> codes;
#pragma unroll
  for (int i = 0; i < kWords; ++i) codes.word[i] = four_e4m3(h + 4 * i, scale.multiplier);
  store_words(params.output + (uint64_t{target.row} * params.inter + target.col), codes);
  if (threadIdx.x % Tuning::kLanes == 0) {
    const auto scales = params.output_scales.of_rows(params.named, target.limit);
    *scales.place(target.row, target.group) = scale.stored;
  }
}

// Stores first with the quick scale, without a branch, and once more if the quick scale is not
// valid for this maximum.
template <class Tuning>
__device__ inline void store_piece(const SwigluParams& params, const Target& target,
                                   const float* h) {
  const float amax = group_amax<Tuning>(h);
  const QuickGroupScale quick = quick_group_scale(amax);
  if (target.col >= params.inter) return;
  store_scaled<Tuning>(params, target, h, quick.scale);
  if (__builtin_expect(!quick.is_right, 0)) {
    store_scaled<Tuning>(params, target, h, group_scale(amax));
  }
}

// The lanes of a group have the same row, so all of them reach a shuffle or none.
template <class Input, class Tuning, bool kHasParameters>
__global__ void __launch_bounds__(Tuning::kThreads, Tuning::kMinBlocks)
    activate_swiglu_kernel(const __grid_constant__ SwigluParams params) {
  const Place place = assign_place<Tuning>(params);
  prefetch_rows(params.named, place.entry);
  wait_for_previous_grids();
  const auto rows = find_rows<1>(params.named, place.entry);
  const uint32_t row = rows.row[0];
  if (row == kNoRow) return;
  const auto piece = load_piece<Input, Tuning>(params, row, rows.limit, place.col);
  trigger_dependent_launch();
  float h[Shape<Input, Tuning>::kCols];
  activate_piece<Input, Tuning, kHasParameters>(piece, params.activation, h);
  store_piece<Tuning>(params, {row, rows.limit, place.group, place.col}, h);
}

// Whether rows are visited in memory order, which takes 275 us instead of 303 at 131072 rows of
// 2048 columns. Small problems visit slots, since most of their rows have none.
bool visits_in_order(const ActivationProblem& problem) {
  constexpr int64_t kManySlots = 4096;
  return problem.has_row_to_slot && problem.slots >= kManySlots;
}

bool has_parameters(const Activation& activation) {
  return activation.alpha.value != 1.0F || activation.beta.value != 0.0F ||
         activation.limit_gate.value != Activation::kNoLimit ||
         activation.limit_up.value != Activation::kNoLimit;
}

SwigluParams make_params(const ActivationProblem& problem, const ActivationArgs& args) {
  const auto inter = static_cast<uint32_t>(problem.inter);
  const bool up_first = problem.gate_order == GateOrder::kUpGate;
  const Activation& activation = args.activation;
  return {.input = static_cast<const uint8_t*>(args.input.values.data),
          .output = static_cast<uint8_t*>(args.output.values.data),
          .input_scales = scale_matrix<const float, uint32_t>(args.input.scales),
          .output_scales = scale_matrix<float, uint32_t>(args.output.scales),
          .named = named_rows(problem, args, visits_in_order(problem)),
          .bundle_tasks = {},
          .inter = inter,
          .first_up = up_first ? 0 : inter,
          .first_gate = up_first ? inter : 0,
          .activation = {.alpha = activation.alpha.value,
                         .beta = activation.beta.value,
                         .limit_gate = activation.limit_gate.value,
                         .limit_up = activation.limit_up.value}};
}

template <class Input, class Tuning, bool kHasParameters = false>
void launch_activate_swiglu(SwigluParams params, const ActivationProblem& problem, Stream stream) {
  const int64_t bundle_tasks = ceil_div(problem.inter, kGroupCols) * Tuning::kBundle;
  const int64_t bundles = ceil_div(params.named.count, Tuning::kBundle);
  constexpr int kTasksPerCta = Tuning::kThreads / Tuning::kLanes;
  params.bundle_tasks = FastDivisor(static_cast<uint32_t>(bundle_tasks));
  const auto blocks = static_cast<unsigned>(ceil_div(bundles * bundle_tasks, kTasksPerCta));
  launch(activate_swiglu_kernel<Input, Tuning, kHasParameters>,
         {.ctas = dim3(blocks), .threads = dim3(Tuning::kThreads)}, stream, params);
}

// Up to kFewGroups the GPU holds all groups almost at once without a limit on registers; up to
// kOneTokenGroups only latency matters.
constexpr int64_t kFewGroups = 32768;
constexpr int64_t kOneTokenGroups = 256;

template <class Input>
void launch_by_size(const SwigluParams& params, const ActivationProblem& problem,
                    const Activation& activation, Stream stream) {
  if (has_parameters(activation)) {
    return launch_activate_swiglu<Input, GeneralTuning<Input>, true>(params, problem, stream);
  }
  const int64_t groups = problem.slots * ceil_div(problem.inter, kGroupCols);
  if (groups <= kOneTokenGroups) {
    return launch_activate_swiglu<Input, OneTokenTuning<Input>>(params, problem, stream);
  }
  if (groups <= kFewGroups) {
    return launch_activate_swiglu<Input, FewRowsTuning<Input>>(params, problem, stream);
  }
  launch_activate_swiglu<Input, ManyRowsTuning<Input>>(params, problem, stream);
}

void launch_fitting(const ActivationProblem& problem, const ActivationArgs& args, Stream stream) {
  const SwigluParams params = make_params(problem, args);
  switch (problem.input) {
    case DType::kF8E4M3:
      return launch_by_size<E4m3Input>(params, problem, args.activation, stream);
    case DType::kBF16:
      return launch_by_size<Bf16Input>(params, problem, args.activation, stream);
    default:
      return launch_by_size<F32Input>(params, problem, args.activation, stream);
  }
}

void run(const ActivationProblem& problem, const ActivationArgs& args, Stream stream) {
  if (problem.slots == 0 || problem.rows == 0 || problem.inter == 0) return;
  const CudaDeviceScope scope(problem.device);
  launch_fitting(problem, args, stream);
}

Support supports(const ActivationProblem& problem) {
  if (problem.format != RowFormat::kFp8Group) return Support::no("writes fp8_1x128 rows only");
  if (problem.kind != ActivationKind::kSwiglu) return Support::no("computes swiglu only");
  if (problem.gate_order == GateOrder::kInterleaved) {
    return Support::no("does not read interleaved gates");
  }
  if (problem.per_expert) return Support::no("takes one value for all experts");
  if (problem.input != DType::kF8E4M3 && problem.input != DType::kBF16 &&
      problem.input != DType::kF32) {
    return Support::no("reads F8_E4M3, BF16 and F32 only");
  }
  if (problem.has_wide_strides) return Support::no("strides of scales must be below 2^32");
  return fits_flat_index(problem);
}

}  // namespace

const ActivationImpl kActivationSm90Swiglu{"sm90_swiglu", on_own_code<supports>, run};
const ActivationImpl kActivationSm80Swiglu{"sm80_swiglu", on_portable_code<supports>, run};

}  // namespace narrowfloat
