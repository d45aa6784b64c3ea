// See quantize_case.h.
#include "conformance/quantize_case.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/ranges.h>

#include "base/float_ops.h"
#include "conformance/case_sampling.h"
#include "support/special_floats.h"
#include "tensor/block_math.h"

namespace narrowfloat::testing {
namespace {

// Finite and positive: what a host may pass.
float sample_scale(Random& random) {
  switch (random.range(0, 7)) {
    case 0:
      return 1.0F;
    case 1:
      return kFloatMax;
    case 2:
      return bits_float(static_cast<uint32_t>(random.range(1, 0x7FFFFF)));
    case 3:
      return bits_float(float_bits(0x1p126F) + static_cast<uint32_t>(random.range(-2, 2)));
    case 4:
      return bits_float(static_cast<uint32_t>(random.range(1, 0x7F7FFFFF)));
    default:
      return std::ldexp(1.0F + std::abs(random.normal()), static_cast<int>(random.range(-12, 12)));
  }
}

// A device scale is not checked: anything may be there.
float sample_device_scale(Random& random) {
  if (random.chance(85)) return sample_scale(random);
  return random.pick({0.0F, -0.0F, -3.0F, kFloatInfinity, -kFloatInfinity, bits_float(0x7FC00000U),
                      bits_float(0xFFA00001U), 0x1p-149F});
}

int32_t sample_valid_rows(Random& random, int64_t rows) {
  const auto all = static_cast<int32_t>(rows);
  return random.pick({0, 1, all, all + 7, -3, all / 2, std::max(0, all - 1),
                      std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()});
}

std::vector<int32_t> sample_row_list(Random& random, int64_t rows) {
  std::vector<int32_t> list(static_cast<size_t>(random.range(0, rows + 4)));
  for (int32_t& row : list) row = static_cast<int32_t>(random.range(-2, rows + 2));
  if (!list.empty() && random.chance(20)) list[0] = std::numeric_limits<int32_t>::min();
  return list;
}

// Ascending from 0 to rows, with empty groups.
std::vector<int64_t> sample_row_offsets(Random& random, int64_t rows) {
  std::vector<int64_t> offsets{0, rows};
  for (int64_t i = random.range(0, 4); i > 0; --i) offsets.push_back(random.range(0, rows));
  if (random.chance(30)) offsets.push_back(0);
  if (random.chance(30)) offsets.push_back(rows);
  std::sort(offsets.begin(), offsets.end());
  return offsets;
}

class Sampler {
 public:
  Sampler(QuantizeCase& out, uint64_t seed)
      : case_(out), random_(seed), info_(format_info(out.format)) {}

  void draw() {
    draw_source();
    draw_shape();
    draw_input();
    if (info_.scale_type == ScaleType::kF32) {
      draw_fp8_options();
    } else {
      draw_byte_scale_options();
    }
    if (case_.is_norm()) draw_norm_options();
  }

 private:
  void draw_source() {
    const int64_t choice = random_.range(0, 99);
    case_.source = choice < 60   ? RowSourceKind::kPlain
                   : choice < 70 ? RowSourceKind::kSiluMul
                   : choice < 80 ? RowSourceKind::kSmooth
                   : choice < 90 ? RowSourceKind::kRmsNorm
                                 : RowSourceKind::kAddRmsNorm;
    case_.dtype = random_.pick({DType::kBF16, DType::kF16});
    if (case_.source == RowSourceKind::kSmooth) case_.dtype = DType::kBF16;
    if (case_.source != RowSourceKind::kPlain) return;
    case_.dtype = random_.pick({DType::kBF16, DType::kBF16, DType::kF16, DType::kF32});
    const bool takes_e4m3 = case_.format == FormatId::kNvfp4 || case_.format == FormatId::kMxfp4;
    if (takes_e4m3 && random_.chance(20)) case_.dtype = DType::kF8E4M3;
  }

  void draw_shape() {
    case_.rows = sample_rows(random_);
    case_.cols = sample_cols(random_, column_multiple(info_));
    case_.batch = random_.chance(25) ? random_.range(0, 3) : 1;
    if (case_.is_norm() && case_.cols > 0 && case_.cols < 64) case_.cols = 64;
    // Large in one direction only, so that many cases fit into the time.
    while (case_.batch * case_.rows * case_.cols > 200000) case_.rows /= 2;
    if (case_.format == FormatId::kMxfp8) {
      case_.alignment = random_.pick<int64_t>({32, 32, 64, 128, 96});
    }
    case_.gap = random_.chance(30) ? random_.range(1, 40) : 0;
    case_.misalignment = random_.range(0, 63);
    case_.input_rank = random_.chance(30) ? 3 : 2;
  }

  void draw_input() {
    case_.fill = static_cast<Fill>(random_.range(0, kNumFills - 1));
    if (random_.chance(25)) case_.fill = Fill::kNormalRows;
  }

  void draw_byte_scale_options() {
    if (info_.scale_type == ScaleType::kUE8M0 && case_.dtype != DType::kF8E4M3) {
      case_.mx_scale =
          random_.pick({Ue8m0Rounding::kUp, Ue8m0Rounding::kFloor, Ue8m0Rounding::kEven});
    }
    if (!case_.is_norm() && random_.chance(20)) {
      case_.valid_rows.emplace();
      for (int64_t i = 0; i < case_.batch; ++i) {
        case_.valid_rows->push_back(sample_valid_rows(random_, case_.rows));
      }
    }
    if (info_.has_row_scale) {
      if (random_.chance(40)) {
        case_.base_decode_scale = sample_scale(random_);
        case_.is_base_a_tensor = random_.chance(50);
      }
      if (!case_.valid_rows && !case_.is_norm() && case_.batch == 1 && random_.chance(25)) {
        case_.row_list = sample_row_list(random_, case_.rows);
      }
    }
    draw_encode_scale();
    if (info_.has_global_scale && case_.dtype != DType::kF8E4M3 && random_.chance(35)) {
      case_.four_over_six = {
          .enabled = true,
          .error = random_.pick({FourOverSixError::kMae, FourOverSixError::kMse}),
          .error_math = random_.pick({FourOverSixMath::kStrict, FourOverSixMath::kFast}),
          .e4m3_max = random_.pick({448, 256})};
    }
  }

  void draw_encode_scale() {
    const bool takes_one = case_.format == FormatId::kNvfp4 ||
                           (case_.format == FormatId::kMxfp4 && case_.dtype == DType::kF8E4M3);
    if (!takes_one) return;
    const int64_t choice = random_.range(0, 99);
    if (choice < 40) return;  // From the maximum; 1 for MXFP4.
    if (choice < 65) {
      case_.encode_scale = sample_scale(random_);
      return;
    }
    const int64_t per_axis = case_.valid_rows ? case_.batch : case_.rows;
    const int64_t count = choice < 80 ? 1 : per_axis;
    for (int64_t i = 0; i < count; ++i) {
      case_.encode_scales.push_back(sample_device_scale(random_));
    }
  }

  void draw_fp8_options() {
    case_.fp8_rule = random_.pick({Fp8ScaleRule::kReciprocal, Fp8ScaleRule::kReciprocal,
                                   Fp8ScaleRule::kReciprocalPow2, Fp8ScaleRule::kAmaxDiv,
                                   Fp8ScaleRule::kPow2Ceil});
    const bool is_fast =
        case_.math == MathMode::kFast && case_.fp8_rule == Fp8ScaleRule::kReciprocal;
    const bool divides =
        case_.fp8_rule == Fp8ScaleRule::kAmaxDiv || case_.fp8_rule == Fp8ScaleRule::kPow2Ceil;
    if (!is_fast && random_.chance(40)) {
      case_.fp8_eps = random_.pick({448.0F * 0x1p-126F, 1e-10F, 1e-4F, 3.0F});
      if (!divides && random_.chance(40)) case_.fp8_eps = 0.0F;
    }
    if (case_.format == FormatId::kFp8Tensor && random_.chance(40)) {
      case_.fp8_decode_scale = sample_scale(random_);
      case_.fp8_rule = Fp8ScaleRule::kReciprocal;
      case_.fp8_eps.reset();
    }
    const bool has_groups =
        case_.format == FormatId::kFp8Block1x128 && case_.layout == ScaleLayoutId::kMnMajor;
    if (has_groups && random_.chance(40)) {
      case_.batch = 1;
      case_.row_offsets = sample_row_offsets(random_, case_.rows);
    }
  }

  void draw_norm_options() {
    case_.has_norm_output = random_.chance(50);
    case_.norm_eps = random_.pick({1e-6F, 1e-5F, 0.0F, 1.0F, 0x1p-140F});
    if (random_.chance(40)) {
      do {
        case_.extra_layout = static_cast<ScaleLayoutId>(random_.range(0, 3));
      } while (!info_.allows(*case_.extra_layout));
    }
  }

  QuantizeCase& case_;
  Random random_;
  const FormatInfo& info_;
};

}  // namespace

int64_t QuantizeCase::num_global_scales() const {
  const FormatInfo& info = format_info(format);
  if (!info.has_global_scale) return 0;
  if (info.has_row_scale) return batch * rows;
  if (!encode_scales.empty()) return static_cast<int64_t>(encode_scales.size());
  // An encode scale per row of no rows, or per batch of no batches, looks like none given.
  return !encode_scale && valid_rows ? batch : 1;
}

bool QuantizeCase::is_visited(int64_t batch_idx, int64_t row) const {
  if (row_list) {
    return std::find(row_list->begin(), row_list->end(), row) != row_list->end();
  }
  return !valid_rows || row < (*valid_rows)[static_cast<size_t>(batch_idx)];
}

int64_t QuantizeCase::scale_row(int64_t row) const {
  const FormatInfo& info = format_info(format);
  if (info.block_rows == 0) return 0;
  if (row_offsets.empty()) return row / info.block_rows;
  // The last group that starts at or before the row: spec 8.6 with loops.
  size_t group = 0;
  while (row_offsets[group + 1] <= row) ++group;
  const int64_t start = row_offsets[group];
  return (start + 31 * static_cast<int64_t>(group)) / 32 * 32 + (row - start);
}

QuantizeCase sample_quantize_case(FormatId format, ScaleLayoutId layout, MathMode math,
                                  uint64_t seed) {
  QuantizeCase out;
  out.seed = seed;
  out.format = format;
  out.layout = layout;
  out.math = math;
  Sampler(out, seed).draw();
  return out;
}

std::string to_string(const QuantizeCase& c) {
  std::string text =
      fmt::format("{} {} {}x{}x{} gap {} rank {} misaligned {} fill {} -> {} {} {}", name(c.source),
                  name(c.dtype), c.batch, c.rows, c.cols, c.gap, c.input_rank, c.misalignment,
                  name(c.fill), name(c.format), name(c.layout), name(c.math));
  if (c.alignment != 32) text += fmt::format(" alignment {}", c.alignment);
  if (c.encode_scale) text += fmt::format(" encode_scale {:a}", *c.encode_scale);
  if (!c.encode_scales.empty()) text += fmt::format(" encode_scales[{}]", c.encode_scales.size());
  if (c.four_over_six.enabled) {
    text += fmt::format(" four_over_six error {} math {} max {}",
                        static_cast<int>(c.four_over_six.error),
                        static_cast<int>(c.four_over_six.error_math), c.four_over_six.e4m3_max);
  }
  if (c.base_decode_scale) {
    text += fmt::format(" base {:a}{}", *c.base_decode_scale, c.is_base_a_tensor ? "[1]" : "");
  }
  if (c.row_list) text += fmt::format(" row_list {}", *c.row_list);
  if (c.valid_rows) text += fmt::format(" valid_rows {}", *c.valid_rows);
  if (!c.row_offsets.empty()) text += fmt::format(" row_offsets {}", c.row_offsets);
  if (c.mx_scale != Ue8m0Rounding::kUp) text += fmt::format(" {}", name(c.mx_scale));
  if (c.fp8_rule != Fp8ScaleRule::kReciprocal) text += fmt::format(" {}", name(c.fp8_rule));
  if (c.fp8_eps) text += fmt::format(" eps {:a}", *c.fp8_eps);
  if (c.fp8_decode_scale) text += fmt::format(" decode {:a}", *c.fp8_decode_scale);
  if (c.has_norm_output) text += " norm_output";
  if (c.extra_layout) text += fmt::format(" extra {}", name(*c.extra_layout));
  return text;
}

}  // namespace narrowfloat::testing
