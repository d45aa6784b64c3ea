// prepare() on the GPU: weights in checkpoint order to the image of weight_units.h. A block of 128
// threads makes a unit; each thread fetches its own pairs of neighbouring columns, so that a warp
// reads 32 bytes of every row (4-bit codes), and stores 16 bytes at a time.
#include <algorithm>
#include <cuda_runtime.h>
#include <memory>

#include "device/ptx/grid_dependency.cuh"
#include "device/vector_io.cuh"
#include "formats/minifloat.h"
#include "narrowfloat/error.h"
#include "ops/grouped_gemm/sm90/weight_units.h"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/launch.h"
#include "tensor/layouts/registry.h"

namespace narrowfloat {
namespace {

constexpr int kThreads = 128;
constexpr uint32_t kE4m3Nan = 0x7F;

struct PrepareParams {
  const uint8_t* codes = nullptr;  // [experts][rows][cols]
  uint8_t* image = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t blocks = 0;  // Of an expert.
  int64_t units = 0;   // Of a block.
  int64_t num_units = 0;
  // Null without block scales.
  const uint8_t* scales = nullptr;
  ScaleLayoutId layout = ScaleLayoutId::kLinear;
  ImageExtents scale_extents{0, 0};  // Of an expert.
  int64_t scale_image = 0;           // Scales from an expert to the next.
  int32_t* misfit = nullptr;         // Set where weights do not fit the coding.
};

// Of one unit: where it comes from and goes to.
template <WeightCoding kCoding>
class UnitSource {
 public:
  static constexpr int kBits = code_bits_of(kCoding);
  static constexpr int kUnitCols = unit_cols(kCoding);

  __device__ UnitSource(const PrepareParams& params, int64_t index) : params_(params) {
    const int64_t block = index / params.units;
    expert_ = block / params.blocks;
    first_row_ = (block - expert_ * params.blocks) * kUnitRows;
    first_col_ = (index - block * params.units) * kUnitCols;
    unit_ = params.image + index * unit_bytes(kCoding);
  }

  [[nodiscard]] __device__ uint8_t* unit() const { return unit_; }
  // Row `half` of the thread's two.
  [[nodiscard]] __device__ int64_t row(int half) const {
    const auto thread = static_cast<int>(threadIdx.x);
    return first_row_ + thread / 32 * 16 + thread % 32 / 4 * 2 + half;
  }
  // First column of register `index` of the fragment of step `step`.
  [[nodiscard]] __device__ int64_t col(int step, int index) const {
    constexpr int kCols = kUnitCols / 32;  // Of a register.
    return first_col_ + 8 * kCols * step + kCols * (threadIdx.x % 4) + 4 * kCols * (index / 2);
  }
  [[nodiscard]] __device__ int64_t first_col() const { return first_col_; }

  // Two codes, the even column in the lower bits; zeros outside.
  [[nodiscard]] __device__ uint32_t load_pair(int64_t row, int64_t col) const {
    if (row >= params_.rows || col >= params_.cols) return 0;
    const int64_t at = (expert_ * params_.rows + row) * params_.cols + col;
    const uint8_t* codes = params_.codes + at * kBits / 8;
    if constexpr (kBits == 4) return *codes;
    if constexpr (kBits == 8) return *reinterpret_cast<const uint16_t*>(codes);
    if constexpr (kBits == 16) return *reinterpret_cast<const uint32_t*>(codes);
  }
  // Four codes likewise.
  [[nodiscard]] __device__ uint32_t load_four(int64_t row, int64_t col) const {
    return load_pair(row, col) | load_pair(row, col + 2) << (2 * kBits);
  }

  // A block scale's byte, or `outside`.
  [[nodiscard]] __device__ uint32_t load_scale(int64_t row, int64_t block, uint32_t outside) const {
    if (row >= params_.scale_extents.rows || block >= params_.scale_extents.blocks) return outside;
    return params_.scales[scale_index(row, block)];
  }
  // The scale of 128 x 128; 1 where there are none.
  [[nodiscard]] __device__ float load_grid_scale() const {
    if (params_.scales == nullptr) return 1.0F;
    const auto* scales = reinterpret_cast<const float*>(params_.scales);
    return scales[scale_index(first_row_ / 128, first_col_ / 128)];
  }

 private:
  [[nodiscard]] __device__ int64_t scale_index(int64_t row, int64_t block) const {
    return expert_ * params_.scale_image +
           AllLayouts::offset(params_.layout, row, block, params_.scale_extents);
  }

  const PrepareParams& params_;
  int64_t expert_;
  int64_t first_row_;
  int64_t first_col_;
  uint8_t* unit_;
};

// A pair of e2m1 codes at the places of pair `pair` in a word of eight (fragments.cuh).
__device__ uint32_t place_e2m1(uint32_t codes, int pair) {
  uint32_t word = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t code = codes >> (4 * half) & 0xFU;
    const uint32_t sign = code >> 3;
    const uint32_t magnitude = code & 7U;
    const int at = 16 * half;
    if (pair == 0) word |= (magnitude | sign << 9) << at;
    if (pair == 1) word |= (magnitude << 4 | sign << 13) << at;
    if (pair == 2) word |= magnitude << (10 + at) | sign << (3 + 16 - at);
    if (pair == 3) word |= ((magnitude >> 1) << 7 | (magnitude & 1U) << 14 | sign << 15) << at;
  }
  return word;
}

// An E4M3 scale's magnitude as 5 exponent bits (of 2^(e - 10)) and 3 mantissa bits; not for 0.
__device__ uint32_t normalized_scale(uint32_t code) {
  const uint32_t magnitude = code & 0x7FU;
  if (magnitude == kE4m3Nan) return 20U << 3 | 1U;
  if (magnitude >= 8) return magnitude + (3U << 3);
  if (magnitude >= 4) return 3U << 3 | (magnitude - 4) << 1;
  if (magnitude >= 2) return 2U << 3 | (magnitude - 2) << 2;
  return 1U << 3;
}

// Codes with the sign of their scale, and zero where the scale is.
__device__ uint32_t with_scale_sign(uint32_t codes, uint32_t scale) {
  if ((scale & 0x7FU) == 0) return 0;
  return (scale & 0x80U) != 0 ? codes ^ 0x8888U : codes;
}

// 135 - r of a row's group of 128 columns (moe spec 11.3): r is the least with 6 * largest <= 448 *
// 2^r, 0 if all scales are.
template <class Source>
__device__ uint32_t rounding_code(const Source& source, int64_t row) {
  uint32_t largest = 0;
  const int64_t first = source.first_col() / 128 * 8;
  for (int block = 0; block < 8; ++block) {
    const uint32_t magnitude = source.load_scale(row, first + block, 0) & 0x7FU;
    if (magnitude != kE4m3Nan) largest = max(largest, magnitude);
  }
  int exponent = largest == 0 ? 0 : -16;
  const float scale = E4M3::decode(static_cast<uint8_t>(largest));
  while (6.0F * scale > 448.0F * power_of_two(exponent)) ++exponent;
  return static_cast<uint32_t>(135 - exponent);
}

template <WeightCoding kCoding>
__device__ void make_e2m1_codes(const UnitSource<kCoding>& source) {
  constexpr bool kIsNvfp4 = kCoding >= WeightCoding::kNvfp4;
  uint32_t words[4] = {};
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const int64_t row = source.row(pair % 2);
      const int64_t col = source.col(step, pair);
      uint32_t codes = source.load_pair(row, col);
      if constexpr (kIsNvfp4) codes = with_scale_sign(codes, source.load_scale(row, col / 16, 0));
      words[step] |= place_e2m1(codes, pair);
    }
  }
  store(source.unit() + threadIdx.x * 16, uint4{words[0], words[1], words[2], words[3]});
}

// Eight e2m1 codes of a row as fragments_fp8.cuh has them: of two registers.
__device__ uint32_t place_e2m1_of_row(uint32_t first, uint32_t second) {
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = first >> (4 * i) & 0xFU;
    const uint32_t high = second >> (4 * i) & 0xFU;
    word |= (low & 7U) << (4 * i) | (low >> 3) << (8 * i + 7);
    word |= (high & 7U) << (16 + 4 * i) | (high >> 3) << (8 * i + 3);
  }
  return word;
}

template <WeightCoding kCoding>
__device__ uint32_t load_e2m1_four(const UnitSource<kCoding>& source, int64_t row, int64_t col) {
  const uint32_t codes = source.load_four(row, col);
  if constexpr (kCoding == WeightCoding::kMxfp4Fp8) return codes;
  return with_scale_sign(codes, source.load_scale(row, col / 16, 0));
}

template <WeightCoding kCoding>
__device__ void make_e2m1_rows(const UnitSource<kCoding>& source) {
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int step = 2 * part + i / 2;
      const int64_t row = source.row(i % 2);
      words[i] = place_e2m1_of_row(load_e2m1_four(source, row, source.col(step, 0)),
                                   load_e2m1_four(source, row, source.col(step, 2)));
    }
    store(source.unit() + (part * kThreads + threadIdx.x) * 16,
          uint4{words[0], words[1], words[2], words[3]});
  }
}

template <WeightCoding kCoding>
__device__ void make_wide_codes(const UnitSource<kCoding>& source) {
  constexpr int kSteps = kCoding == WeightCoding::kMxfp8 ? 2 : 1;  // Of 16 bytes.
#pragma unroll
  for (int part = 0; part < 4 / kSteps; ++part) {
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < 4 * kSteps; ++i) {
      const int64_t row = source.row(i % 2);
      const int64_t col = source.col(part * kSteps + i / 4, i % 4);
      if constexpr (kCoding == WeightCoding::kBf16) words[i] = source.load_pair(row, col);
      if constexpr (kCoding == WeightCoding::kFp8) words[i] = source.load_four(row, col);
      if constexpr (kSteps == 2) words[i / 2] |= source.load_pair(row, col) << (16 * (i % 2));
    }
    store(source.unit() + (part * kThreads + threadIdx.x) * 16,
          uint4{words[0], words[1], words[2], words[3]});
  }
}

// A NaN code makes its row's results NaN whatever the activations: so does a NaN scale, and the
// decode of codes knows no NaN.
__device__ bool has_nan(const UnitSource<WeightCoding::kMxfp8>& source, int64_t row, int block) {
  bool found = false;
  for (int i = 0; i < 32; i += 2) {
    const uint32_t codes = source.load_pair(row, source.first_col() + block * 32 + i);
    found = found || (codes & 0x7FU) == kE4m3Nan || (codes >> 8 & 0x7FU) == kE4m3Nan;
  }
  return found;
}

// By two of the four threads that share their rows: thread % 4 is the row.
template <WeightCoding kCoding>
__device__ void make_scales(const UnitSource<kCoding>& source) {
  constexpr int kScaleCols = kCoding >= WeightCoding::kNvfp4 ? 16 : 32;
  constexpr int kBlocks = UnitSource<kCoding>::kUnitCols / kScaleCols;
  const int half = static_cast<int>(threadIdx.x % 4);
  if (half >= 2) return;
  const int64_t row = source.row(half);
  uint8_t* scales = source.unit() + unit_code_bytes(kCoding);
  uint8_t* own = scales + threadIdx.x / 4 * (2 * kBlocks) + half * 2;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const int64_t col_block = source.first_col() / kScaleCols + block;
    uint32_t code = source.load_scale(row, col_block, kBlocks == 4 ? 0x38 : 127);
    if constexpr (kBlocks == 4) code = normalized_scale(code);
    if constexpr (kCoding == WeightCoding::kMxfp8) {
      if (has_nan(source, row, block)) code = 0xFF;
    }
    own[block / 2 * 4 + block % 2] = static_cast<uint8_t>(code);
  }
  if constexpr (kCoding == WeightCoding::kNvfp4Rounded) {
    scales[256 + threadIdx.x / 4 * 2 + half] = static_cast<uint8_t>(rounding_code(source, row));
  }
}

// False where all codes of a block of 32 columns mean zero: its scale does not count.
__device__ bool has_values(const UnitSource<WeightCoding::kMxfp4Fp8>& source, int64_t row,
                           int64_t block) {
  uint32_t magnitudes = 0;
  for (int i = 0; i < 32; i += 4) magnitudes |= source.load_four(row, block * 32 + i) & 0x7777U;
  return magnitudes != 0;
}

// The largest scale of the group gets k = 6, the largest that E4M3 holds with 6, and the others
// what they are below it (moe spec 11.2). Codes of k below -5, NaN, and factors that are no normal
// number do not fit.
__device__ bool make_group_scales(const UnitSource<WeightCoding::kMxfp4Fp8>& source) {
  const int half = static_cast<int>(threadIdx.x % 4);
  if (half >= 2) return true;
  const int64_t row = source.row(half);
  uint32_t codes[4];
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t block = source.first_col() / 32 + i;
    codes[i] = has_values(source, row, block) ? source.load_scale(row, block, 0) : 0x100U;
    if (codes[i] <= 0xFFU) largest = max(largest, codes[i]);
  }
  if (largest == 0) largest = 127;
  uint8_t* scales = source.unit() + unit_code_bytes(WeightCoding::kMxfp4Fp8);
  bool fits = largest > 6 && largest < 0xFF;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t below = codes[i] <= 0xFFU ? largest - codes[i] : 11U;
    fits = fits && below <= 11U;
    scales[threadIdx.x / 4 * 8 + half * 4 + i] = static_cast<uint8_t>(8U * (11U - below));
  }
  scales[256 + threadIdx.x / 4 * 2 + half] = static_cast<uint8_t>(largest - 6);
  return fits;
}

// Codes of scale * 2^-r. Half of it must be a normal E4M3 number, unless the scale is 0.
__device__ bool make_group_scales(const UnitSource<WeightCoding::kNvfp4Fp8>& source) {
  constexpr uint32_t kLeast = 2U << 3;
  const int half = static_cast<int>(threadIdx.x % 4);
  if (half >= 2) return true;
  const int64_t row = source.row(half);
  const uint32_t down = 135U - rounding_code(source, row);  // r, modulo 2^32.
  uint8_t* scales = source.unit() + unit_code_bytes(WeightCoding::kNvfp4Fp8);
  bool fits = true;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t scale = source.load_scale(row, source.first_col() / 16 + i, 0);
    const bool is_zero = (scale & 0x7FU) == 0;
    const uint32_t normalized = normalized_scale(scale);
    const auto code = static_cast<int>(normalized - ((3U + down) << 3));
    fits = fits && (is_zero || (code >= static_cast<int>(kLeast) && (scale & 0x7FU) != kE4m3Nan));
    const bool is_middle = (normalized & 7U) >= 1 && (normalized & 7U) <= 5;
    const uint32_t stored = static_cast<uint32_t>(code) | (is_middle ? 0x80U : 0U);
    scales[threadIdx.x / 4 * 16 + half * 8 + i] = static_cast<uint8_t>(is_zero ? kLeast : stored);
  }
  scales[512 + threadIdx.x / 4 * 2 + half] = static_cast<uint8_t>(127U + down);
  return fits;
}

template <WeightCoding kCoding>
__device__ void make_unit(const PrepareParams& params, const UnitSource<kCoding>& source) {
  if constexpr (kCoding >= WeightCoding::kMxfp4Fp8) {
    make_e2m1_rows(source);
    if (!make_group_scales(source)) *params.misfit = 1;
  } else if constexpr (code_bits_of(kCoding) == 4) {
    make_e2m1_codes(source);
    make_scales(source);
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
__global__ void __launch_bounds__(kThreads)
    make_units_kernel(const __grid_constant__ PrepareParams params) {
  wait_for_previous_grids();
  for (int64_t index = blockIdx.x; index < params.num_units; index += gridDim.x) {
    make_unit(params, UnitSource<kCoding>(params, index));
  }
}

template <WeightCoding kCoding>
void launch_make_units(const PrepareParams& params, Stream stream) {
  constexpr int64_t kMaxBlocks = 1 << 20;
  const auto blocks = static_cast<unsigned>(std::min(params.num_units, kMaxBlocks));
  launch(make_units_kernel<kCoding>, {dim3(blocks), dim3(kThreads)}, stream, params);
}

void launch_make_units(WeightCoding coding, const PrepareParams& params, Stream stream) {
  switch (coding) {
    case WeightCoding::kBf16:
      return launch_make_units<WeightCoding::kBf16>(params, stream);
    case WeightCoding::kFp8:
      return launch_make_units<WeightCoding::kFp8>(params, stream);
    case WeightCoding::kMxfp8:
      return launch_make_units<WeightCoding::kMxfp8>(params, stream);
    case WeightCoding::kMxfp4:
      return launch_make_units<WeightCoding::kMxfp4>(params, stream);
    case WeightCoding::kNvfp4:
      return launch_make_units<WeightCoding::kNvfp4>(params, stream);
    case WeightCoding::kNvfp4Rounded:
      return launch_make_units<WeightCoding::kNvfp4Rounded>(params, stream);
    case WeightCoding::kMxfp4Fp8:
      return launch_make_units<WeightCoding::kMxfp4Fp8>(params, stream);
    case WeightCoding::kNvfp4Fp8:
      return launch_make_units<WeightCoding::kNvfp4Fp8>(params, stream);
  }
}

std::shared_ptr<uint8_t> allocate(int64_t size_bytes, Device device) {
  void* data = nullptr;
  check_cuda(cudaMalloc(&data, static_cast<size_t>(size_bytes)), "cudaMalloc");
  return {static_cast<uint8_t*>(data), [device](uint8_t* memory) {
            const CudaDeviceScope scope(device);
            cudaFree(memory);
          }};
}

int64_t image_bytes_of(const GroupedGemmProblem& problem, const UnitGrid& grid) {
  return problem.experts * grid.blocks * grid.block_bytes();
}

// Waits until the image is made: later launches may read it on any stream. An empty image if the
// weights do not fit the coding.
WeightImage make_image(const GroupedGemmProblem& problem, const WeightSource& source,
                       WeightCoding coding, Stream stream) {
  const UnitGrid grid(problem, coding);
  const auto image = allocate(image_bytes_of(problem, grid), problem.device);
  const auto misfit = allocate(sizeof(int32_t), problem.device);
  PrepareParams params{.codes = source.values,
                       .image = image.get(),
                       .rows = problem.rows,
                       .cols = problem.cols,
                       .blocks = grid.blocks,
                       .units = grid.units,
                       .num_units = problem.experts * grid.blocks * grid.units};
  if (source.scales.data != nullptr) {
    params.scales = static_cast<const uint8_t*>(source.scales.data);
    params.layout = source.scales.layout;
    params.scale_extents = {source.scales.rows, source.scales.blocks};
    params.scale_image = source.scales.capacity / source.scales.batch;
  }
  params.misfit = reinterpret_cast<int32_t*>(misfit.get());
  clear_async(params.misfit, sizeof(int32_t), stream);
  launch_make_units(coding, params, stream);
  int32_t has_misfit = 0;
  check_cuda(cudaMemcpyAsync(&has_misfit, params.misfit, sizeof(int32_t), cudaMemcpyDeviceToHost,
                             cuda_stream(stream)),
             "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(cuda_stream(stream)), "cudaStreamSynchronize");
  if (has_misfit != 0) return {};
  return {.bytes = image, .form = static_cast<int>(coding)};
}

}  // namespace

int64_t unit_image_bytes(const GroupedGemmProblem& problem) {
  return image_bytes_of(problem, UnitGrid(problem, coding_of(problem.mode)));
}

WeightImage make_unit_image(const GroupedGemmProblem& problem, const WeightSource& source,
                            Stream stream) {
  const CudaDeviceScope scope(problem.device);
  WeightImage image = make_image(problem, source, coding_of(problem.mode), stream);
  if (image.bytes != nullptr) return image;
  return make_image(problem, source, wide_coding(coding_of(problem.mode)), stream);
}

}  // namespace narrowfloat
