// prepare() on the GPU: weights in checkpoint order to the image of weight_units.h. A block of 128
// threads makes a unit; each thread fetches its own pairs of neighbouring columns, so that a warp
// reads 32 bytes of every row (4-bit codes), and stores 16 bytes at a time.
//
// All experts get the mode's first form; those that do not fit it get the other one in its place.
#include <algorithm>
#include <cuda_runtime.h>
#include <string>
#include <vector>

#include "device/ptx/grid_dependency.cuh"
#include "device/vector_io.cuh"
#include "narrowfloat/error.h"
#include "ops/grouped_gemm/sm90/unit_steps.cuh"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/device_memory.h"
#include "runtime/cuda/launch.h"

namespace narrowfloat {
namespace {

template <WeightCoding kCoding>
__device__ void make_unit(const UnitSource<kCoding>& source) {
  if constexpr (kCoding >= WeightCoding::kMxfp4Fp8) {
    make_e2m1_rows(source);
    if (!make_group_scales(source)) source.flags().misfits = 1;
  } else if constexpr (code_bits_of(kCoding) == 4) {
    make_e2m1_codes(source);
    make_scales(source);
  } else if constexpr (kCoding == WeightCoding::kFp8) {
    make_panel(source);
  } else {
    make_wide_codes(source);
  }
  if constexpr (kCoding == WeightCoding::kMxfp8) make_scales(source);
  if constexpr (kCoding == WeightCoding::kFp8) {
    const float scale = source.load_grid_scale();
    if (threadIdx.x == 0) {
      store(source.unit() + unit_code_bytes(kCoding), float4{scale, scale, scale, scale});
    }
  }
}

template <WeightCoding kCoding>
__global__ void __launch_bounds__(kPrepareThreads)
    make_units_kernel(const __grid_constant__ PrepareParams params) {
  wait_for_previous_grids();
  for (int64_t index = blockIdx.x; index < params.num_units; index += gridDim.x) {
    make_unit(UnitSource<kCoding>(params, index));
  }
}

// A thread a weight row.
template <WeightCoding kCoding>
__global__ void __launch_bounds__(kPrepareThreads)
    find_row_shifts_kernel(const __grid_constant__ PrepareParams params) {
  wait_for_previous_grids();
  const int64_t row = int64_t{blockIdx.x} * kPrepareThreads + threadIdx.x;
  const int64_t expert_units = params.blocks * params.units;
  const int64_t rows = params.rows.rows;
  if (row >= params.num_units / expert_units * rows) return;
  const UnitSource<kCoding> source(params, row / rows * expert_units);
  const int shift = find_row_shift(source, row % rows, params.scale_extents.blocks);
  params.row_shifts[row] = static_cast<int8_t>(shift);
}

__global__ void __launch_bounds__(kPrepareThreads)
    make_row_powers_kernel(const int8_t* shifts, int64_t count, float* powers) {
  wait_for_previous_grids();
  const int64_t row = int64_t{blockIdx.x} * kPrepareThreads + threadIdx.x;
  if (row < count) powers[row] = power_of_two(shifts[row]);
}

dim3 blocks_of_threads(int64_t threads) {
  return dim3(static_cast<unsigned>(ceil_div(threads, int64_t{kPrepareThreads})));
}

template <WeightCoding kCoding>
void launch_make_units(const PrepareParams& params, int64_t experts, Stream stream) {
  constexpr int64_t kMaxBlocks = 1 << 20;
  if constexpr (has_row_powers(kCoding)) {
    launch(find_row_shifts_kernel<kCoding>,
           {blocks_of_threads(experts * params.rows.rows), dim3(kPrepareThreads)}, stream, params);
  }
  const auto blocks = static_cast<unsigned>(std::min(params.num_units, kMaxBlocks));
  launch(make_units_kernel<kCoding>, {dim3(blocks), dim3(kPrepareThreads)}, stream, params);
}

void launch_make_units(WeightCoding coding, const PrepareParams& params, int64_t experts,
                       Stream stream) {
  switch (coding) {
    case WeightCoding::kBf16:
      return launch_make_units<WeightCoding::kBf16>(params, experts, stream);
    case WeightCoding::kFp8:
      return launch_make_units<WeightCoding::kFp8>(params, experts, stream);
    case WeightCoding::kMxfp8:
      return launch_make_units<WeightCoding::kMxfp8>(params, experts, stream);
    case WeightCoding::kMxfp4Near:
      return launch_make_units<WeightCoding::kMxfp4Near>(params, experts, stream);
    case WeightCoding::kMxfp4:
      return launch_make_units<WeightCoding::kMxfp4>(params, experts, stream);
    case WeightCoding::kNvfp4:
      return launch_make_units<WeightCoding::kNvfp4>(params, experts, stream);
    case WeightCoding::kNvfp4Rounded:
      return launch_make_units<WeightCoding::kNvfp4Rounded>(params, experts, stream);
    case WeightCoding::kMxfp4Fp8:
      return launch_make_units<WeightCoding::kMxfp4Fp8>(params, experts, stream);
    case WeightCoding::kNvfp4Fp8:
      return launch_make_units<WeightCoding::kNvfp4Fp8>(params, experts, stream);
  }
}

class ImageMaker {
 public:
  ImageMaker(const GroupedGemmProblem& problem, Stream stream)
      : problem_(problem),
        stream_(stream),
        expert_bytes_(expert_image_bytes(problem)),
        bytes_(allocate_device_memory(problem.device, problem.experts * expert_bytes_)),
        flag_bytes_(allocate_device_memory(problem.device, problem.experts * kFlagBytes)),
        forms_(static_cast<size_t>(problem.experts),
               static_cast<uint8_t>(coding_of(problem.mode))) {
    clear_flags(0, problem.experts);
    const WeightCoding coding = coding_of(problem.mode);
    if (!has_row_powers(coding)) return;
    // Experts in a form without shifts keep the zeros.
    shift_bytes_ = allocate_device_memory(problem.device, problem.experts * problem.rows);
    clear_async(shift_bytes_.get(), static_cast<size_t>(problem.experts * problem.rows), stream);
  }

  // Waits until the weights of `source`, `count` experts from `first` on, have been read.
  void add(int64_t first, int64_t count, const WeightSource& source) {
    const WeightCoding coding = coding_of(problem_.mode);
    make_experts(coding, {.first = first, .count = count}, source);
    std::vector<ExpertFlags> flags = read_flags(first, count);
    int64_t misfits = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (flags[static_cast<size_t>(i)].misfits == 0) continue;
      ++misfits;
      clear_flags(first + i, 1);
      forms_[static_cast<size_t>(first + i)] = static_cast<uint8_t>(wide_coding(coding));
      make_experts(wide_coding(coding), {.first = first + i, .count = 1, .in_source = i}, source);
    }
    if (misfits > 0) flags = read_flags(first, count);
    for (const ExpertFlags& found : flags) has_shifts_ = has_shifts_ || found.shifts != 0;
    misfits_ += misfits;
  }

  // Later launches may read it on any stream.
  PackedWeightData take() {
    const WeightCoding coding = coding_of(problem_.mode);
    const bool all_wide = misfits_ == problem_.experts;
    PackedWeightData image{.bytes = bytes_,
                           .size_bytes = problem_.experts * expert_bytes_,
                           .encoding = static_cast<int>(all_wide ? wide_coding(coding) : coding)};
    add_tables(all_wide ? 0 : misfits_, image);
    return image;
  }

 private:
  static constexpr auto kFlagBytes = static_cast<int64_t>(sizeof(ExpertFlags));

  struct Experts {
    int64_t first = 0;
    int64_t count = 1;
    int64_t in_source = 0;  // The first.
  };

  void make_experts(WeightCoding coding, const Experts& experts, const WeightSource& source) const {
    const UnitGrid grid(problem_, coding);
    const int64_t source_row = experts.in_source * problem_.rows;
    PrepareParams params{
        .codes = source.values + source_row * problem_.cols / 8 * code_bits_of(coding),
        .image = bytes_.get() + experts.first * expert_bytes_,
        .rows = image_rows(problem_),
        .cols = problem_.cols,
        .blocks = grid.blocks,
        .units = grid.units,
        .num_units = experts.count * grid.blocks * grid.units,
        .expert_bytes = expert_bytes_,
        .row_shifts = row_shifts(experts.first),
        .flags = reinterpret_cast<ExpertFlags*>(flag_bytes_.get()) + experts.first};
    if (source.scales.data != nullptr) {
      params.layout = source.scales.layout;
      params.scale_extents = {source.scales.rows, source.scales.blocks};
      params.scale_image = source.scales.capacity / source.scales.batch;
      params.scales = static_cast<const uint8_t*>(source.scales.data) +
                      experts.in_source * params.scale_image * bytes(source.scales.type);
    }
    launch_make_units(coding, params, experts.count, stream_);
  }

  void clear_flags(int64_t first, int64_t count) const {
    clear_async(flag_bytes_.get() + first * kFlagBytes, static_cast<size_t>(count * kFlagBytes),
                stream_);
  }

  // From an expert on; null where there are none.
  [[nodiscard]] int8_t* row_shifts(int64_t expert) const {
    if (shift_bytes_ == nullptr) return nullptr;
    return reinterpret_cast<int8_t*>(shift_bytes_.get()) + expert * problem_.rows;
  }

  [[nodiscard]] std::vector<ExpertFlags> read_flags(int64_t first, int64_t count) const {
    std::vector<ExpertFlags> flags(static_cast<size_t>(count));
    copy_to_host(flags.data(), flag_bytes_.get() + first * kFlagBytes, count * kFlagBytes,
                 problem_.device, stream_);
    for (int64_t i = 0; i < count; ++i) {
      if (flags[static_cast<size_t>(i)].spreads == 0) continue;
      throw Error(ErrorKind::kUnsupported,
                  "weights.scales: in a row of expert " + std::to_string(first + i) +
                      " the largest and the least scale of a block with values are further apart "
                      "than the exponents of bf16 reach; use the CPU, or fewer powers of two");
    }
    return flags;
  }

  // The experts' forms where `misfits` of them have another than the image, and the powers of two
  // that rows were moved by.
  void add_tables(int64_t misfits, PackedWeightData& image) const {
    const int64_t rows = has_shifts_ ? problem_.experts * problem_.rows : 0;
    const int64_t power_bytes = rows * static_cast<int64_t>(sizeof(float));
    const int64_t size_bytes = power_bytes + (misfits > 0 ? problem_.experts : 0);
    const auto tables = allocate_device_memory(problem_.device, size_bytes);
    if (misfits > 0) {
      copy_to_device(tables.get() + power_bytes, forms_.data(), problem_.experts, problem_.device,
                     stream_);
      image.tables.expert_encodings = tables.get() + power_bytes;
      image.tables.rest_encoding = static_cast<int>(wide_coding(coding_of(problem_.mode)));
    }
    if (has_shifts_) {
      image.tables.row_powers = make_powers(rows, reinterpret_cast<float*>(tables.get()));
    }
    image.table_bytes = tables;
    image.size_bytes += size_bytes;
    wait_for(problem_.device, stream_);
  }

  const float* make_powers(int64_t rows, float* powers) const {
    launch(make_row_powers_kernel, {blocks_of_threads(rows), dim3(kPrepareThreads)}, stream_,
           static_cast<const int8_t*>(row_shifts(0)), rows, powers);
    return powers;
  }

  const GroupedGemmProblem& problem_;
  Stream stream_;
  int64_t expert_bytes_;
  std::shared_ptr<uint8_t> bytes_;
  std::shared_ptr<uint8_t> flag_bytes_;
  std::shared_ptr<uint8_t> shift_bytes_;  // Null without UE8M0 scales.
  std::vector<uint8_t> forms_;            // Of experts.
  int64_t misfits_ = 0;
  bool has_shifts_ = false;
};

}  // namespace

PackedWeightData make_unit_image(const GroupedGemmProblem& problem, const WeightPieces& pieces,
                                 Stream stream) {
  const CudaDeviceScope scope(problem.device);
  ImageMaker maker(problem, stream);
  for (int64_t first = 0; first < problem.experts; first += pieces.experts) {
    maker.add(first, pieces.experts, pieces.from(first));
  }
  return maker.take();
}

}  // namespace narrowfloat
