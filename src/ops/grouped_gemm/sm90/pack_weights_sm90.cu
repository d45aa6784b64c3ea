// prepare() on the GPU: weights in checkpoint order to packed weights (packed_weights.h). A CTA of
// 128 threads makes a k tile; each thread fetches its own pairs of neighbouring columns, so that a
// warp reads 32 bytes of every row (4-bit codes), and stores 16 bytes at a time.
//
// All experts get the mode's first encoding; those that do not fit it get the other one in its
// place.
#include <algorithm>
#include <cuda_runtime.h>
#include <string>
#include <vector>

#include "device/ptx/grid_dependency.cuh"
#include "device/vector_io.cuh"
#include "formats/minifloat.h"
#include "narrowfloat/error.h"
#include "ops/grouped_gemm/packed/pack_source.cuh"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/device_memory.h"
#include "runtime/cuda/launch.h"

namespace narrowfloat {

// The parts of a k tile: codes in fragment order, and scales. Each of the kPrepareThreads threads
// makes what it will hold in the GEMM.

// A pair of e2m1 codes at the places of pair `pair` in a word of eight (weight_decoder.cuh).
__device__ inline uint32_t place_e2m1(uint32_t codes, int pair) {
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
__device__ inline uint32_t normalized_scale(uint32_t code) {
  const uint32_t magnitude = code & 0x7FU;
  if (magnitude == kE4m3Nan) return 20U << 3 | 1U;
  if (magnitude >= 8) return magnitude + (3U << 3);
  if (magnitude >= 4) return 3U << 3 | (magnitude - 4) << 1;
  if (magnitude >= 2) return 2U << 3 | (magnitude - 2) << 2;
  return 1U << 3;
}

// Codes with the sign of their scale, and zero where the scale is.
__device__ inline uint32_t with_scale_sign(uint32_t codes, uint32_t scale) {
  if ((scale & 0x7FU) == 0) return 0;
  return (scale & 0x80U) != 0 ? codes ^ 0x8888U : codes;
}

// 135 - r of a row's group of 128 columns (moe spec 11.3): r is the least with 6 * largest <= 448 *
// 2^r, 0 if all scales are.
template <class Source>
__device__ inline uint32_t rounding_code(const Source& source, int64_t row) {
  uint32_t largest = 0;
  const int64_t first = source.first_col() / 128 * 8;
  for (int block = 0; block < 8; ++block) {
    const uint32_t magnitude = source.load_scale(row, first + block, 0) & 0x7FU;
    if (magnitude != kE4m3Nan) largest = max(largest, magnitude);
  }
  return static_cast<uint32_t>(135 - rounding_exponent(largest));
}

template <WeightEncoding kEncoding>
__device__ inline void make_e2m1_codes(const KTileSource<kEncoding>& source) {
  constexpr bool kIsNvfp4 = kEncoding >= WeightEncoding::kNvfp4;
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
  store(source.k_tile() + threadIdx.x * 16, uint4{words[0], words[1], words[2], words[3]});
}

// Eight e2m1 codes of a row as weight_decoder.cuh has them: of two registers.
__device__ inline uint32_t place_e2m1_of_row(uint32_t first, uint32_t second) {
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

template <WeightEncoding kEncoding>
__device__ inline uint32_t load_e2m1_four(const KTileSource<kEncoding>& source, int64_t row,
                                          int64_t col) {
  const uint32_t codes = source.load_four(row, col);
  if constexpr (kEncoding == WeightEncoding::kMxfp4Fp8) return codes;
  return with_scale_sign(codes, source.load_scale(row, col / 16, 0));
}

template <WeightEncoding kEncoding>
__device__ inline void make_e2m1_rows(const KTileSource<kEncoding>& source) {
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
    store(source.k_tile() + (part * kPrepareThreads + threadIdx.x) * 16,
          uint4{words[0], words[1], words[2], words[3]});
  }
}

template <WeightEncoding kEncoding>
__device__ inline void make_wide_codes(const KTileSource<kEncoding>& source) {
  constexpr int kSteps = kEncoding == WeightEncoding::kMxfp8 ? 2 : 1;  // In 16 bytes.
#pragma unroll
  for (int part = 0; part < 4 / kSteps; ++part) {
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < 4 * kSteps; ++i) {
      const int64_t row = source.row(i % 2);
      const int64_t col = source.col(part * kSteps + i / 4, i % 4);
      if constexpr (kEncoding == WeightEncoding::kBf16) words[i] = source.load_pair(row, col);
      if constexpr (kSteps == 2) words[i / 2] |= source.load_pair(row, col) << (16 * (i % 2));
    }
    store(source.k_tile() + (part * kPrepareThreads + threadIdx.x) * 16,
          uint4{words[0], words[1], words[2], words[3]});
  }
}

// [64 rows][128 bytes] in the 128-byte swizzle: 16-byte chunk c of row r lies at c ^ (r % 8).
__device__ inline void make_fp8_codes(const KTileSource<WeightEncoding::kFp8>& source) {
  constexpr int kPassRows = kPrepareThreads / 8;
  const auto chunk = static_cast<int>(threadIdx.x % 8);
#pragma unroll
  for (int pass = 0; pass < kSubtileRows / kPassRows; ++pass) {
    const int place = pass * kPassRows + static_cast<int>(threadIdx.x / 8);
    const int64_t row = source.fp8_row(place);
    const int64_t col = source.first_col() + chunk * 16;
    uint4 codes;
    codes.x = source.load_four(row, col);
    codes.y = source.load_four(row, col + 4);
    codes.z = source.load_four(row, col + 8);
    codes.w = source.load_four(row, col + 12);
    store(source.k_tile() + place * 128 + (chunk ^ place % 8) * 16, codes);
  }
}

// A NaN code makes its row's results NaN whatever the activations: so does a NaN scale, and the
// decode of codes knows no NaN.
__device__ inline bool has_nan(const KTileSource<WeightEncoding::kMxfp8>& source, int64_t row,
                               int block) {
  bool found = false;
  for (int i = 0; i < 32; i += 2) {
    const uint32_t codes = source.load_pair(row, source.first_col() + block * 32 + i);
    found = found || (codes & 0x7FU) == kE4m3Nan || (codes >> 8 & 0x7FU) == kE4m3Nan;
  }
  return found;
}

// Two of the four threads that share their rows do it: thread % 4 is the row.
template <WeightEncoding kEncoding>
__device__ inline void make_scales(const KTileSource<kEncoding>& source) {
  constexpr int kScaleCols = kEncoding >= WeightEncoding::kNvfp4 ? 16 : 32;
  constexpr int kBlocks = KTileSource<kEncoding>::kKTileCols / kScaleCols;
  const int half = static_cast<int>(threadIdx.x % 4);
  if (half >= 2) return;
  const int64_t row = source.row(half);
  uint8_t* scales = source.k_tile() + k_tile_code_bytes(kEncoding);
  uint8_t* own = scales + threadIdx.x / 4 * (2 * kBlocks) + half * 2;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const int64_t col_block = source.first_col() / kScaleCols + block;
    uint32_t code = source.load_scale(row, col_block, kBlocks == 4 ? 0x38 : 127);
    if constexpr (kBlocks == 4) {
      code = normalized_scale(code);
    } else {
      code = shifted_scale(code, source.row_shift(row));
    }
    // NaN does not fit, and zeros have any scale.
    if constexpr (kEncoding == WeightEncoding::kMxfp4Near) {
      code = min(code + kNearScaleOffset, uint32_t{kLargestScale});
    }
    if constexpr (kEncoding == WeightEncoding::kMxfp8) {
      if (has_nan(source, row, block)) code = 0xFF;
    }
    own[block / 2 * 4 + block % 2] = static_cast<uint8_t>(code);
  }
  if constexpr (kEncoding == WeightEncoding::kNvfp4Rounded) {
    scales[256 + threadIdx.x / 4 * 2 + half] = static_cast<uint8_t>(rounding_code(source, row));
  }
}

// The largest scale of the row gets k = 6, the largest that E4M3 holds with 6, and the others what
// they are below it (moe spec 11.2). Codes of k below -5 and NaN do not fit.
__device__ inline bool make_group_scales(const KTileSource<WeightEncoding::kMxfp4Fp8>& source) {
  const int half = static_cast<int>(threadIdx.x % 4);
  if (half >= 2) return true;
  const int64_t row = source.row(half);
  const int largest = source.row_shift(row) + 127 + 6;
  uint8_t* scales = source.k_tile() + k_tile_code_bytes(WeightEncoding::kMxfp4Fp8);
  bool fits = true;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t block = source.first_col() / 32 + i;
    const auto scale = source.load_scale(row, block, 0);
    const int below = largest - static_cast<int>(scale);
    const bool is_inside = below >= 0 && below <= kMostMxfp4Fp8Spread && scale != kUe8m0Nan;
    fits = fits && (is_inside || (scale != kUe8m0Nan && !has_values(source, row, block)));
    const int shift = is_inside ? kMostMxfp4Fp8Spread - below : 0;
    scales[threadIdx.x / 4 * 8 + half * 4 + i] = static_cast<uint8_t>(8 * shift);
  }
  return fits;
}

// Codes of scale * 2^-r. Half of it must be a normal E4M3 number, unless the scale is 0. So the
// rounding is that of any smaller r, such as that of the group of 128 columns (moe spec 11.3).
__device__ inline bool make_group_scales(const KTileSource<WeightEncoding::kNvfp4Fp8>& source) {
  constexpr uint32_t kLeast = 2U << 3;
  const int half = static_cast<int>(threadIdx.x % 4);
  if (half >= 2) return true;
  const int64_t row = source.row(half);
  const auto down = static_cast<uint32_t>(source.row_shift(row));  // r, modulo 2^32.
  uint8_t* scales = source.k_tile() + k_tile_code_bytes(WeightEncoding::kNvfp4Fp8);
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
  return fits;
}

namespace {

template <WeightEncoding kEncoding>
__device__ void make_k_tile(const KTileSource<kEncoding>& source) {
  if constexpr (kEncoding >= WeightEncoding::kMxfp4Fp8) {
    make_e2m1_rows(source);
    if (!make_group_scales(source)) source.flags().misfits = 1;
  } else if constexpr (code_bits_of(kEncoding) == 4) {
    make_e2m1_codes(source);
    make_scales(source);
  } else if constexpr (kEncoding == WeightEncoding::kFp8) {
    make_fp8_codes(source);
  } else {
    make_wide_codes(source);
  }
  if constexpr (kEncoding == WeightEncoding::kMxfp8) make_scales(source);
  if constexpr (kEncoding == WeightEncoding::kFp8) {
    const float scale = source.load_grid_scale();
    if (threadIdx.x == 0) {
      store(source.k_tile() + k_tile_code_bytes(kEncoding), float4{scale, scale, scale, scale});
    }
  }
}

template <WeightEncoding kEncoding>
__global__ void __launch_bounds__(kPrepareThreads)
    make_k_tiles_kernel(const __grid_constant__ PrepareParams params) {
  wait_for_previous_grids();
  for (int64_t index = blockIdx.x; index < params.num_k_tiles; index += gridDim.x) {
    make_k_tile(KTileSource<kEncoding>(params, index));
  }
}

// A thread a weight row.
template <WeightEncoding kEncoding>
__global__ void __launch_bounds__(kPrepareThreads)
    find_row_shifts_kernel(const __grid_constant__ PrepareParams params) {
  wait_for_previous_grids();
  const int64_t row = int64_t{blockIdx.x} * kPrepareThreads + threadIdx.x;
  const int64_t expert_k_tiles = params.blocks * params.k_tiles;
  const int64_t rows = params.rows.rows;
  if (row >= params.num_k_tiles / expert_k_tiles * rows) return;
  const KTileSource<kEncoding> source(params, row / rows * expert_k_tiles);
  const int shift = find_row_shift(source, row % rows, params.scale_extents.blocks);
  params.row_shifts[row] = static_cast<int8_t>(shift);
}

__global__ void __launch_bounds__(kPrepareThreads)
    make_row_powers_kernel(const int8_t* shifts, int64_t count, float* powers) {
  wait_for_previous_grids();
  const int64_t row = int64_t{blockIdx.x} * kPrepareThreads + threadIdx.x;
  if (row < count) powers[row] = power_of_two(shifts[row]);
}

dim3 num_ctas(int64_t threads) {
  return dim3(static_cast<unsigned>(ceil_div(threads, int64_t{kPrepareThreads})));
}

template <WeightEncoding kEncoding>
void launch_make_k_tiles(const PrepareParams& params, int64_t experts, Stream stream) {
  constexpr int64_t kMaxBlocks = 1 << 20;
  if constexpr (has_row_powers(kEncoding)) {
    launch(find_row_shifts_kernel<kEncoding>,
           {num_ctas(experts * params.rows.rows), dim3(kPrepareThreads)}, stream, params);
  }
  const auto blocks = static_cast<unsigned>(std::min(params.num_k_tiles, kMaxBlocks));
  launch(make_k_tiles_kernel<kEncoding>, {dim3(blocks), dim3(kPrepareThreads)}, stream, params);
}

void launch_make_k_tiles(WeightEncoding encoding, const PrepareParams& params, int64_t experts,
                         Stream stream) {
  switch (encoding) {
    case WeightEncoding::kBf16:
      return launch_make_k_tiles<WeightEncoding::kBf16>(params, experts, stream);
    case WeightEncoding::kFp8:
      return launch_make_k_tiles<WeightEncoding::kFp8>(params, experts, stream);
    case WeightEncoding::kMxfp8:
      return launch_make_k_tiles<WeightEncoding::kMxfp8>(params, experts, stream);
    case WeightEncoding::kMxfp4Near:
      return launch_make_k_tiles<WeightEncoding::kMxfp4Near>(params, experts, stream);
    case WeightEncoding::kMxfp4:
      return launch_make_k_tiles<WeightEncoding::kMxfp4>(params, experts, stream);
    case WeightEncoding::kNvfp4:
      return launch_make_k_tiles<WeightEncoding::kNvfp4>(params, experts, stream);
    case WeightEncoding::kNvfp4Rounded:
      return launch_make_k_tiles<WeightEncoding::kNvfp4Rounded>(params, experts, stream);
    case WeightEncoding::kMxfp4Fp8:
      return launch_make_k_tiles<WeightEncoding::kMxfp4Fp8>(params, experts, stream);
    case WeightEncoding::kNvfp4Fp8:
      return launch_make_k_tiles<WeightEncoding::kNvfp4Fp8>(params, experts, stream);
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
        encodings_(static_cast<size_t>(problem.experts),
                   static_cast<uint8_t>(encoding_of(problem.mode))) {
    clear_flags(0, problem.experts);
    const WeightEncoding encoding = encoding_of(problem.mode);
    if (!has_row_powers(encoding)) return;
    // Experts in a encoding without shifts keep the zeros.
    shift_bytes_ = allocate_device_memory(problem.device, problem.experts * problem.rows);
    clear_async(shift_bytes_.get(), static_cast<size_t>(problem.experts * problem.rows), stream);
  }

  // Waits until the weights of `source`, `count` experts from `first` on, have been read.
  void add(int64_t first, int64_t count, const WeightSource& source) {
    const WeightEncoding encoding = encoding_of(problem_.mode);
    make_experts(encoding, {.first = first, .count = count}, source);
    std::vector<ExpertFlags> flags = read_flags(first, count);
    int64_t misfits = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (flags[static_cast<size_t>(i)].misfits == 0) continue;
      ++misfits;
      clear_flags(first + i, 1);
      encodings_[static_cast<size_t>(first + i)] = static_cast<uint8_t>(wide_encoding(encoding));
      make_experts(wide_encoding(encoding), {.first = first + i, .count = 1, .in_source = i},
                   source);
    }
    if (misfits > 0) flags = read_flags(first, count);
    for (const ExpertFlags& found : flags) has_shifts_ = has_shifts_ || found.shifts != 0;
    misfits_ += misfits;
  }

  // Later launches may read it on any stream.
  PackedWeightData take() {
    const WeightEncoding encoding = encoding_of(problem_.mode);
    const bool all_wide = misfits_ == problem_.experts;
    PackedWeightData image{
        .bytes = bytes_,
        .size_bytes = problem_.experts * expert_bytes_,
        .encoding = static_cast<int>(all_wide ? wide_encoding(encoding) : encoding)};
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

  void make_experts(WeightEncoding encoding, const Experts& experts,
                    const WeightSource& source) const {
    const PackedGrid grid(problem_, encoding);
    const int64_t source_row = experts.in_source * problem_.rows;
    PrepareParams params{
        .codes = source.values + source_row * problem_.cols / 8 * code_bits_of(encoding),
        .image = bytes_.get() + experts.first * expert_bytes_,
        .rows = image_rows(problem_),
        .cols = problem_.cols,
        .blocks = grid.blocks,
        .k_tiles = grid.k_tiles,
        .num_k_tiles = experts.count * grid.blocks * grid.k_tiles,
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
    launch_make_k_tiles(encoding, params, experts.count, stream_);
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

  // The experts' encodings where `misfits` of them have another than the image, and the powers of
  // two that rows were moved by.
  void add_tables(int64_t misfits, PackedWeightData& image) const {
    const int64_t rows = has_shifts_ ? problem_.experts * problem_.rows : 0;
    const int64_t power_bytes = rows * static_cast<int64_t>(sizeof(float));
    const int64_t size_bytes = power_bytes + (misfits > 0 ? problem_.experts : 0);
    const auto tables = allocate_device_memory(problem_.device, size_bytes);
    if (misfits > 0) {
      copy_to_device(tables.get() + power_bytes, encodings_.data(), problem_.experts,
                     problem_.device, stream_);
      image.tables.expert_encodings = tables.get() + power_bytes;
      image.tables.rest_encoding = static_cast<int>(wide_encoding(encoding_of(problem_.mode)));
    }
    if (has_shifts_) {
      image.tables.row_powers = make_powers(rows, reinterpret_cast<float*>(tables.get()));
    }
    image.table_bytes = tables;
    image.size_bytes += size_bytes;
    wait_for(problem_.device, stream_);
  }

  const float* make_powers(int64_t rows, float* powers) const {
    launch(make_row_powers_kernel, {num_ctas(rows), dim3(kPrepareThreads)}, stream_,
           static_cast<const int8_t*>(row_shifts(0)), rows, powers);
    return powers;
  }

  const GroupedGemmProblem& problem_;
  Stream stream_;
  int64_t expert_bytes_;
  std::shared_ptr<uint8_t> bytes_;
  std::shared_ptr<uint8_t> flag_bytes_;
  std::shared_ptr<uint8_t> shift_bytes_;  // Null without UE8M0 scales.
  std::vector<uint8_t> encodings_;        // One an expert.
  int64_t misfits_ = 0;
  bool has_shifts_ = false;
};

}  // namespace

PackedWeightData make_packed_weights(const GroupedGemmProblem& problem, const WeightPieces& pieces,
                                     Stream stream) {
  const CudaDeviceScope scope(problem.device);
  ImageMaker maker(problem, stream);
  for (int64_t first = 0; first < problem.experts; first += pieces.experts) {
    maker.add(first, pieces.experts, pieces.from(first));
  }
  return maker.take();
}

}  // namespace narrowfloat
