// See gemm_case.h.
#include "support/gemm_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include "ops/grouped_gemm/grouped_gemm_checks.h"
#include "support/element_codes.h"
#include "support/environment.h"
#include "support/int8_values.h"
#include "support/moe_modes.h"
#include "support/planned_codes.h"

namespace narrowfloat::testing {
namespace {

// How a side of the product is stored: the table of moe spec 1.2, written out again.
struct Storage {
  DType dtype;
  int64_t block_rows;
  int64_t block_cols;  // 0: no block scales.
  ScaleType scale;
};

Storage weight_storage(MoeMode mode) {
  switch (mode) {
    case MoeMode::kBf16:
      return {DType::kBF16, 1, 0, ScaleType::kF32};
    case MoeMode::kFp8Tensor:
      return {DType::kF8E4M3, 1, 0, ScaleType::kF32};
    case MoeMode::kFp8Block:
      return {DType::kF8E4M3, 128, 128, ScaleType::kF32};
    case MoeMode::kMxfp8:
      return {DType::kF8E4M3, 1, 32, ScaleType::kUE8M0};
    case MoeMode::kMxfp4Mxfp8:
    case MoeMode::kMxfp4Bf16:
    case MoeMode::kMxfp4Fp8:
    case MoeMode::kMxfp4Fp8Token:
    case MoeMode::kMxfp4Int8:
      return {DType::kU8, 1, 32, ScaleType::kUE8M0};
    default:
      return {DType::kU8, 1, 16, ScaleType::kE4M3};
  }
}

Storage input_storage(MoeMode mode) {
  switch (mode) {
    case MoeMode::kBf16:
    case MoeMode::kMxfp4Bf16:
    case MoeMode::kNvfp4Bf16:
    case MoeMode::kMxfp4Int8:
    case MoeMode::kNvfp4Int8:
      return {DType::kBF16, 1, 0, ScaleType::kF32};
    case MoeMode::kFp8Tensor:
    case MoeMode::kMxfp4Fp8Token:
    case MoeMode::kNvfp4Fp8Token:
      return {DType::kF8E4M3, 1, 0, ScaleType::kF32};
    case MoeMode::kMxfp8:
    case MoeMode::kMxfp4Mxfp8:
      return {DType::kF8E4M3, 1, 32, ScaleType::kUE8M0};
    case MoeMode::kNvfp4:
    case MoeMode::kNvfp4PerToken:
      return {DType::kU8, 1, 16, ScaleType::kE4M3};
    default:
      return {DType::kF8E4M3, 1, 128, ScaleType::kF32};
  }
}

bool has_row_scale(MoeMode mode) {
  return mode == MoeMode::kNvfp4PerToken || mode == MoeMode::kMxfp4Fp8Token ||
         mode == MoeMode::kNvfp4Fp8Token;
}

int64_t scale_rows(const Storage& storage, int64_t rows) {
  return (rows + storage.block_rows - 1) / storage.block_rows;
}
int64_t scale_blocks(const Storage& storage, int64_t cols) {
  return storage.block_cols == 0 ? 0 : (cols + storage.block_cols - 1) / storage.block_cols;
}

template <typename T>
void append(std::vector<uint8_t>& out, T value) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(&value);
  out.insert(out.end(), bytes, bytes + sizeof(value));
}

float random_float(GemmData data, Random& random) {
  if (data == GemmData::kIntegers) return static_cast<float>(random.range(-8, 8));
  if (data == GemmData::kBits && random.chance(20)) {
    const uint32_t bits = random.bits32();
    float value = 0;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
  return std::ldexp(random.normal(), static_cast<int>(random.range(-3, 3)));
}

// A nibble that is one of 0, 1, 2, 3, 4, 6 with any sign.
unsigned integer_nibble(Random& random) {
  return random.pick({0U, 2U, 4U, 5U, 6U, 7U, 10U, 12U, 13U, 14U, 15U});
}

// Codes [rows][cols] as the case's data plans them, and their values.
void plan_codes(DType dtype, Plan plan, int64_t rows, int64_t cols, std::vector<uint8_t>& codes,
                std::vector<double>& values) {
  for (int64_t i = 0; i < rows * cols; ++i) {
    const unsigned code = planned_code(dtype, plan, i / cols, i % cols);
    if (dtype == DType::kBF16) {
      append(codes, static_cast<uint16_t>(code));
      values.push_back(bf16_value(static_cast<uint16_t>(code)));
    } else if (dtype == DType::kF8E4M3) {
      codes.push_back(static_cast<uint8_t>(code));
      values.push_back(decode_e4m3(code));
    } else {
      if (i % 2 == 0) codes.push_back(static_cast<uint8_t>(code));
      if (i % 2 == 1) codes.back() = static_cast<uint8_t>(codes.back() | code << 4);
      values.push_back(decode_e2m1(code));
    }
  }
}

// Appends one code (two for E2M1: a byte) and its values.
void add_code(DType dtype, GemmData data, Random& random, std::vector<uint8_t>& codes,
              std::vector<double>& values) {
  if (dtype == DType::kF32) {
    const float value = random_float(data, random);
    append(codes, value);
    values.push_back(value);
  } else if (dtype == DType::kBF16) {
    const uint16_t code = bf16_of_exact(random_float(data, random));
    append(codes, code);
    values.push_back(bf16_value(code));
  } else if (dtype == DType::kF8E4M3) {
    auto code = static_cast<uint8_t>(random.bits());
    if (data == GemmData::kIntegers) code = e4m3_of_exact(static_cast<double>(random.range(-8, 8)));
    if (data == GemmData::kRandom && (code & 0x7F) == 0x7F) code = 0x7E;
    codes.push_back(code);
    values.push_back(decode_e4m3(code));
  } else {
    auto code = static_cast<uint8_t>(random.bits());
    if (data == GemmData::kIntegers) {
      code = static_cast<uint8_t>(integer_nibble(random) | (integer_nibble(random) << 4));
    }
    codes.push_back(code);
    values.push_back(decode_e2m1(code & 0xFU));
    values.push_back(decode_e2m1(code >> 4));
  }
}

// From the least to the largest.
struct ScaleBytes {
  int least;
  int most;
};

// The parameters that a scale is made from.
struct ScaleWish {
  ScaleType type;
  GemmData data;
  bool is_wide;
  ScaleBytes bytes;  // UE8M0.
  Plan plan;
  PlannedBlock at;
};

// Scales of weights: up to the largest scale that MXFP4 has with one multiplication, or beyond it,
// and both near enough to each other that every block counts in a sum.
ScaleBytes weight_bytes_of(const GemmCaseSpec& spec, bool is_far) {
  if (is_far) return {118, 132};
  return spec.wide_scales ? ScaleBytes{116, 128} : ScaleBytes{118, 128};
}
ScaleBytes input_bytes_of(const GemmCaseSpec& spec) {
  return spec.wide_scales ? ScaleBytes{121, 133} : ScaleBytes{122, 132};
}

void add_scale(const ScaleWish& wish, Random& random, std::vector<uint8_t>& scales,
               std::vector<double>& values) {
  const bool is_planned = wish.plan != Plan::kNone;
  const auto power = static_cast<int>(random.range(0, 2));
  if (wish.type == ScaleType::kF32) {
    float scale =
        std::ldexp(1.0F + std::abs(random.normal()), static_cast<int>(random.range(-4, 4)));
    if (wish.data == GemmData::kIntegers) scale = std::ldexp(1.0F, power);
    if (is_planned) scale = 1.0F;
    if (wish.plan == Plan::kEveryCode)
      scale = std::ldexp(1.0F, static_cast<int>(wish.at.row % 64) - 32);
    append(scales, scale);
    values.push_back(scale);
  } else if (wish.type == ScaleType::kUE8M0) {
    auto code = static_cast<uint8_t>(random.range(wish.bytes.least, wish.bytes.most));
    if (wish.data == GemmData::kIntegers) {
      code = static_cast<uint8_t>(std::min(127 + power, wish.bytes.most));
    }
    if (is_planned) code = planned_scale(wish.type, wish.plan, wish.at);
    if (wish.data == GemmData::kBits) code = static_cast<uint8_t>(random.bits());
    scales.push_back(code);
    values.push_back(code == 255 ? std::numeric_limits<double>::quiet_NaN()
                                 : std::ldexp(1.0, code - 127));
  } else {
    const int64_t drawn = random.range(0, 0x7E);
    auto code = static_cast<uint8_t>(wish.is_wide ? drawn : 0x28 + drawn % 0x38);
    if (wish.data == GemmData::kIntegers) code = e4m3_of_exact(std::ldexp(1.0, power));
    if (wish.data == GemmData::kBits) code = static_cast<uint8_t>(random.bits() & 0x7FU);
    if (is_planned) code = planned_scale(wish.type, wish.plan, wish.at);
    scales.push_back(code);
    values.push_back(decode_e4m3(code));
  }
}

}  // namespace

double output_element(DType dtype, const std::vector<uint8_t>& output, int64_t index) {
  const auto at = static_cast<size_t>(index);
  if (dtype == DType::kBF16) {
    uint16_t code = 0;
    std::memcpy(&code, output.data() + at * 2, 2);
    return bf16_value(code);
  }
  if (dtype == DType::kF32) {
    float value = 0;
    std::memcpy(&value, output.data() + at * 4, 4);
    return value;
  }
  double value = 0;
  std::memcpy(&value, output.data() + at * 8, 8);
  return value;
}

std::string to_string(const GemmCaseSpec& spec) {
  return fmt::format(
      "{} {}x{} rows {} tile {}{}{}{}{} bias {} gate {}{} data {} seed {}", name(spec.mode),
      spec.weight_rows, spec.cols, fmt::join(spec.expert_rows, ","), spec.token_tile,
      spec.gathers ? " gather" : "", spec.fp32_rows ? " fp32" : "",
      spec.transposed_scales ? " transposed" : "", spec.has_slot_weights ? " weighted" : "",
      spec.bias ? name(*spec.bias) : "none", spec.gate_order ? name(*spec.gate_order) : "none",
      spec.has_scale ? " scaled" : "", static_cast<int>(spec.data), spec.seed);
}

GemmCase::GemmCase(const GemmCaseSpec& spec) : spec_(spec) {
  Random random(spec.seed);
  make_permutation(random);
  make_weights(random);
  make_inputs(random);
  make_epilogue(random);
}

void GemmCase::make_permutation(Random& random) {
  for (size_t expert = 0; expert < spec_.expert_rows.size(); ++expert) {
    for (int64_t left = spec_.expert_rows[expert]; left > 0; left -= spec_.token_tile) {
      const auto first = static_cast<int64_t>(tile_to_expert_.size()) * spec_.token_tile;
      const int64_t count = std::min<int64_t>(left, spec_.token_tile);
      tile_to_expert_.push_back(static_cast<int32_t>(expert));
      tile_row_end_.push_back(static_cast<int32_t>(first + count));
      for (int64_t row = first; row < first + count; ++row) {
        rows_.push_back({row, static_cast<int64_t>(expert), row});
      }
    }
  }
  num_tiles_ = {static_cast<int32_t>(tile_to_expert_.size())};
  // A tile that is not in use.
  tile_to_expert_.push_back(0);
  tile_row_end_.push_back(0);
  const size_t max_rows = tile_to_expert_.size() * static_cast<size_t>(spec_.token_tile);
  row_to_token_.assign(max_rows, -1);
  row_to_slot_.assign(max_rows, -1);
  input_rows_ = static_cast<int64_t>(max_rows);
  if (spec_.gathers) input_rows_ = (static_cast<int64_t>(rows_.size()) + 1) / 2;
  std::vector<int32_t> slots(rows_.size());
  std::iota(slots.begin(), slots.end(), 0);
  for (size_t i = slots.size(); i > 1; --i) {
    std::swap(slots[i - 1],
              slots[static_cast<size_t>(random.range(0, static_cast<int64_t>(i) - 1))]);
  }
  for (size_t i = 0; i < rows_.size(); ++i) {
    const auto row = static_cast<size_t>(rows_[i].row);
    row_to_slot_[row] = slots[i];
    row_to_token_[row] = static_cast<int32_t>(slots[i] / 2);
    if (spec_.gathers) rows_[i].source = row_to_token_[row];
  }
}

void GemmCase::make_weights(Random& random) {
  const Storage storage = weight_storage(spec_.mode);
  const int64_t count = experts() * spec_.weight_rows * spec_.cols;
  const Plan plan = plan_of(spec_.data, false);
  if (plan != Plan::kNone) {
    plan_codes(storage.dtype, plan, experts() * spec_.weight_rows, spec_.cols, weight_codes_,
               weight_values_);
  }
  while (static_cast<int64_t>(weight_values_.size()) < count) {
    add_code(storage.dtype, spec_.data, random, weight_codes_, weight_values_);
  }
  if (storage.block_cols == 0) return;
  const int64_t rows = scale_rows(storage, spec_.weight_rows);
  const int64_t blocks = scale_blocks(storage, spec_.cols);
  for (int64_t i = 0; i < experts() * rows * blocks; ++i) {
    const bool is_far = std::ranges::count(spec_.wide_experts, i / (rows * blocks)) > 0;
    const PlannedBlock at{rows, i / blocks % rows, i % blocks};
    add_scale({storage.scale, spec_.data, spec_.wide_scales || is_far,
               weight_bytes_of(spec_, is_far), plan, at},
              random, weight_scales_, weight_scale_values_);
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t expert = i / (spec_.weight_rows * spec_.cols);
    const int64_t row = i / spec_.cols % spec_.weight_rows / storage.block_rows;
    const int64_t block = i % spec_.cols / storage.block_cols;
    weight_values_[static_cast<size_t>(i)] *=
        weight_scale_values_[static_cast<size_t>((expert * rows + row) * blocks + block)];
  }
  const bool is_rounded =
      spec_.mode == MoeMode::kNvfp4Fp8Rounded || spec_.mode == MoeMode::kNvfp4Fp8Token;
  if (is_rounded) round_weights();
}

// moe spec 11.3: r from the logarithm, and E4M3 by search.
void GemmCase::round_weights() {
  const int64_t blocks = spec_.cols / 16;
  for (int64_t row = 0; row < experts() * spec_.weight_rows; ++row) {
    for (int64_t first = 0; first < spec_.cols; first += 128) {
      const int64_t end = std::min(first + 128, spec_.cols);
      double largest = 0;
      for (int64_t k = first; k < end; k += 16) {
        const double scale =
            std::abs(weight_scale_values_[static_cast<size_t>(row * blocks + k / 16)]);
        if (scale > largest) largest = scale;
      }
      const double unit = largest == 0 ? 1 : std::exp2(std::ceil(std::log2(6.0 * largest / 448.0)));
      for (int64_t k = first; k < end; ++k) {
        double& value = weight_values_[static_cast<size_t>(row * spec_.cols + k)];
        value = unit * nearest_e4m3(value / unit);
      }
    }
  }
}

void GemmCase::make_inputs(Random& random) {
  Storage storage = input_storage(spec_.mode);
  if (storage.dtype == DType::kBF16 && spec_.fp32_rows) storage.dtype = DType::kF32;
  const int64_t count = input_rows_ * spec_.cols;
  const Plan plan = plan_of(spec_.data, true);
  if (plan != Plan::kNone) {
    plan_codes(storage.dtype, plan, input_rows_, spec_.cols, input_codes, input_values_);
  }
  while (static_cast<int64_t>(input_values_.size()) < count) {
    add_code(storage.dtype, spec_.data, random, input_codes, input_values_);
  }
  if (has_int8_rows(spec_.mode) && spec_.data == GemmData::kIntegers) {
    plant_int8_maxima(storage.dtype, input_codes, input_values_);
  }
  const int64_t blocks = scale_blocks(storage, spec_.cols);
  std::vector<double> scales;
  for (int64_t i = 0; i < input_rows_ * blocks; ++i) {
    const int64_t row = spec_.transposed_scales ? i % input_rows_ : i / blocks;
    const int64_t block = spec_.transposed_scales ? i / input_rows_ : i % blocks;
    const PlannedBlock at{input_rows_, row, block};
    add_scale({storage.scale, spec_.data, spec_.wide_scales, input_bytes_of(spec_), plan, at},
              random, input_scales, scales);
  }
  if (has_int8_rows(spec_.mode)) round_to_int8(input_values_);
  // With transposed scales, (row, block) is stored at block * rows + row.
  for (int64_t i = 0; i < count && blocks > 0; ++i) {
    const int64_t row = i / spec_.cols;
    const int64_t block = i % spec_.cols / storage.block_cols;
    const int64_t at = spec_.transposed_scales ? block * input_rows_ + row : row * blocks + block;
    input_values_[static_cast<size_t>(i)] *= scales[static_cast<size_t>(at)];
  }
  if (spec_.gathers) return;
  // Padding rows hold NaN patterns.
  std::vector<bool> is_valid(static_cast<size_t>(input_rows_));
  for (const Row& row : rows_) is_valid[static_cast<size_t>(row.row)] = true;
  const size_t row_bytes = input_codes.size() / static_cast<size_t>(input_rows_);
  for (size_t row = 0; row < is_valid.size(); ++row) {
    if (!is_valid[row]) std::memset(input_codes.data() + row * row_bytes, 0xFF, row_bytes);
  }
}

void GemmCase::make_epilogue(Random& random) {
  const auto number = [&] {
    const auto integer = static_cast<float>(random.range(1, 4));
    const bool is_exact = spec_.data == GemmData::kIntegers || spec_.data >= GemmData::kEveryWeight;
    return is_exact ? integer : random.normal();
  };
  for (size_t i = 0; i < rows_.size(); ++i) slot_weights_.push_back(number());
  for (int64_t i = 0; i < experts(); ++i) {
    scale_.push_back(spec_.has_scale ? number() : 1.0F);
    gate_scale_.push_back(number());
  }
  for (int64_t i = 0; i < input_rows_; ++i) row_scale.push_back(number());
  for (int64_t i = 0; spec_.bias && i < experts() * spec_.weight_rows; ++i) {
    add_code(*spec_.bias, spec_.data == GemmData::kBits ? GemmData::kRandom : spec_.data, random,
             bias_codes_, bias_values_);
  }
}

void GemmCase::set_weight_scale(int64_t weight_row, int64_t block, uint8_t scale) {
  const Storage storage = weight_storage(spec_.mode);
  const int64_t blocks = scale_blocks(storage, spec_.cols);
  uint8_t& byte = weight_scales_[static_cast<size_t>(weight_row * blocks + block)];
  const int64_t first = block * storage.block_cols;
  for (int64_t col = first; col < std::min(first + storage.block_cols, spec_.cols); ++col) {
    double& value = weight_values_[static_cast<size_t>(weight_row * spec_.cols + col)];
    value = std::ldexp(value, scale - byte);
  }
  byte = scale;
}

void GemmCase::clear_weights(int64_t weight_row, int64_t block) {
  const Storage storage = weight_storage(spec_.mode);
  const int64_t codes_a_byte = storage.dtype == DType::kU8 ? 2 : 1;
  const int64_t at = weight_row * spec_.cols + block * storage.block_cols;
  std::fill_n(weight_codes_.begin() + at / codes_a_byte, storage.block_cols / codes_a_byte,
              uint8_t{0});
  std::fill_n(weight_values_.begin() + at, storage.block_cols, 0.0);
}

bool GemmCase::plant_nan_scale_of_zeros(int64_t weight_row) {
  const Storage storage = weight_storage(spec_.mode);
  if (storage.block_cols == 0 || storage.scale == ScaleType::kF32) return false;
  clear_weights(weight_row, 0);
  weight_scales_[static_cast<size_t>(weight_row * scale_blocks(storage, spec_.cols))] =
      storage.scale == ScaleType::kE4M3 ? 0x7F : 0xFF;
  return true;
}

int64_t GemmCase::weight_bytes() const {
  return static_cast<int64_t>(weight_codes_.size() + weight_scales_.size());
}

WeightView GemmCase::weights(ScaleLayoutId layout) const {
  const Storage storage = weight_storage(spec_.mode);
  const int64_t cols = storage.dtype == DType::kU8 ? spec_.cols / 2 : spec_.cols;
  WeightView view{.values = TensorView::contiguous(weight_codes_.data(), storage.dtype,
                                                   {experts(), spec_.weight_rows, cols}),
                  .scales = {}};
  if (storage.block_cols == 0) return view;
  const int64_t rows = scale_rows(storage, spec_.weight_rows);
  const int64_t blocks = scale_blocks(storage, spec_.cols);
  view.scales = {.data = const_cast<uint8_t*>(weight_scales_.data()),
                 .type = storage.scale,
                 .layout = layout,
                 .device = {},
                 .batch = experts(),
                 .rows = rows,
                 .blocks = blocks,
                 .capacity = experts() * scale_image_size(layout, rows, blocks)};
  if (layout == ScaleLayoutId::kLinear) return view;
  const int64_t scales_per_expert = scale_image_size(layout, rows, blocks);
  swizzled_scales_.assign(static_cast<size_t>(view.scales.capacity), 0xFF);
  for (int64_t i = 0; i < experts() * rows * blocks; ++i) {
    const int64_t offset = scale_offset(layout, i / blocks % rows, i % blocks, rows, blocks);
    swizzled_scales_[static_cast<size_t>(i / (rows * blocks) * scales_per_expert + offset)] =
        weight_scales_[static_cast<size_t>(i)];
  }
  view.scales.data = swizzled_scales_.data();
  return view;
}

GroupedGemmArgs GemmCase::args() const {
  Storage storage = input_storage(spec_.mode);
  if (storage.dtype == DType::kBF16 && spec_.fp32_rows) storage.dtype = DType::kF32;
  const auto vector = [](const auto& values, DType dtype) {
    return TensorView::contiguous(values.data(), dtype, {static_cast<int64_t>(values.size())});
  };
  GroupedGemmArgs args;
  const int64_t cols = storage.dtype == DType::kU8 ? spec_.cols / 2 : spec_.cols;
  args.a.values = TensorView::contiguous(input_codes.data(), storage.dtype, {input_rows_, cols});
  if (storage.block_cols > 0) {
    const DType dtype = storage.scale == ScaleType::kF32    ? DType::kF32
                        : storage.scale == ScaleType::kE4M3 ? DType::kF8E4M3
                                                            : DType::kF8E8M0;
    args.a.scales = TensorView::contiguous(input_scales.data(), dtype,
                                           {input_rows_, scale_blocks(storage, spec_.cols)});
    if (spec_.transposed_scales) args.a.scales.strides = {1, input_rows_};
  }
  if (has_row_scale(spec_.mode)) args.a.row_scale = vector(row_scale, DType::kF32);
  args.gather_tokens = spec_.gathers;
  args.permutation.token_tile = spec_.token_tile;
  args.permutation.row_to_token = vector(row_to_token_, DType::kI32);
  args.permutation.row_to_slot = vector(row_to_slot_, DType::kI32);
  args.permutation.tile_to_expert = vector(tile_to_expert_, DType::kI32);
  args.permutation.tile_row_end = vector(tile_row_end_, DType::kI32);
  args.permutation.num_tiles = vector(num_tiles_, DType::kI32);
  if (spec_.has_slot_weights) args.slot_weights = vector(slot_weights_, DType::kF32);
  if (spec_.has_scale) args.scale = PerExpert(vector(scale_, DType::kF32));
  args.gate_order = spec_.gate_order;
  if (spec_.gate_order) args.gate_scale = PerExpert(vector(gate_scale_, DType::kF32));
  if (spec_.bias) {
    args.bias =
        TensorView::contiguous(bias_codes_.data(), *spec_.bias, {experts(), spec_.weight_rows});
  }
  return args;
}

std::vector<uint8_t> GemmCase::run(const GemmRun& run) const {
  const bool has_bytes = weight_storage(spec_.mode).scale != ScaleType::kF32;
  const ForcedImplementation forced("grouped_gemm", run.implementation);
  const GroupedWeights prepared =
      GroupedWeights::prepare(weights(has_bytes ? run.layout : ScaleLayoutId::kLinear), spec_.mode);
  EXPECT_EQ(prepared.implementation(), run.implementation);
  const GuardedBuffer output(max_rows() * spec_.weight_rows * bits(run.output) / 8,
                             {.poison = 0xFF});
  const int64_t size = grouped_gemm_workspace(prepared, input_rows_, run.accumulation);
  const GuardedBuffer workspace(size, {.poison = run.workspace_poison, .guard = Guard::kPage});
  GroupedGemmArgs call = args();
  call.accumulation = run.accumulation;
  call.output = TensorView::contiguous(output.data(), run.output, {max_rows(), spec_.weight_rows});
  const TensorView memory = TensorView::contiguous(workspace.data(), DType::kU8, {size});
  if (run.gemm) {
    run.gemm(packed_weights(prepared).problem, checked_call(call, prepared, memory));
  } else {
    grouped_gemm(call, prepared, memory);
  }
  EXPECT_TRUE(output.intact() && workspace.intact());
  return output.copy();
}

std::vector<uint8_t> GemmCase::run_rows(const GemmRun& run, int32_t rows) {
  const int32_t end = std::exchange(tile_row_end_.front(), rows);
  std::vector<uint8_t> output = this->run(run);
  tile_row_end_.front() = end;
  return output;
}

bool GemmCase::is_gate_row(int64_t weight_row) const {
  if (!spec_.gate_order) return false;
  switch (*spec_.gate_order) {
    case GateOrder::kUpGate:
      return weight_row >= spec_.weight_rows / 2;
    case GateOrder::kGateUp:
      return weight_row < spec_.weight_rows / 2;
    case GateOrder::kInterleaved:
      return weight_row % 2 == 0;
  }
  return false;
}

GemmCase::Expected GemmCase::expected(const Row& row, int64_t weight_row) const {
  double sum = 0;
  double magnitude = 0;
  for (int64_t k = 0; k < spec_.cols; ++k) {
    const double product = input(row.source, k) * weight(row.expert, weight_row, k);
    sum += product;
    magnitude += std::abs(product);
  }
  double factor = (is_gate_row(weight_row) ? gate_scale_ : scale_)[static_cast<size_t>(row.expert)];
  if (spec_.has_slot_weights) {
    factor *= slot_weights_[static_cast<size_t>(row_to_slot_[static_cast<size_t>(row.row)])];
  }
  if (has_row_scale(spec_.mode)) factor *= row_scale[static_cast<size_t>(row.source)];
  double bias = 0;
  if (spec_.bias) {
    bias = bias_values_[static_cast<size_t>(row.expert * spec_.weight_rows + weight_row)];
  }
  return {factor * sum + bias, std::abs(factor) * magnitude + std::abs(bias)};
}

}  // namespace narrowfloat::testing
