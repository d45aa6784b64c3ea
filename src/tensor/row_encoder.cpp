// See row_encoder.h. The formats' own rules, applied block by block.
#include "tensor/row_encoder.h"

#include "formats/block_codes.h"
#include "formats/registry.h"
#include "tensor/element_io.h"
#include "tensor/encode_row_blocks.h"

namespace narrowfloat {
namespace {

template <BlockFormat Format>
void encode_blocks(const RowRules& rules, const ScalePair& pair, const RowColumns& columns,
                   const RowTarget& target) {
  using Stored = typename Format::Stored;
  auto* scales = static_cast<Stored*>(target.scales);
  encode_row_blocks<Format>(
      columns, pair, BlockRules{.input_max = rules.input_max}, target.values,
      [&](int64_t block, Stored stored) { scales[block * target.scale_stride] = stored; });
}

}  // namespace

RowTarget row_target(const CodedRows& rows, RowFormat format, int64_t row, int64_t cols) {
  RowTarget target{.values =
                       static_cast<uint8_t*>(rows.values.data) + row * row_bytes(format, cols)};
  if (!rows.scales.is_absent()) {
    target.scales =
        element_pointer(rows.scales.data, rows.scales.dtype, row * rows.scales.strides[0]);
    target.scale_stride = rows.scales.strides[1];
  }
  if (!rows.row_scale.is_absent()) {
    target.row_scale = static_cast<float*>(rows.row_scale.data) + row;
  }
  return target;
}

RowEncoder::RowEncoder(const RowRules& rules) : rules_(rules) {
  if (rules.format == RowFormat::kNvfp4) {
    pair_ = Nvfp4::scale_pair<ExactMath>(rules.multiplier);
  }
}

void RowEncoder::start_row(float row_amax, const RowTarget& target) {
  if (rules_.format == RowFormat::kFp8Token) {
    const BlockRules rules{.input_max = rules_.input_max};
    const auto scale = Fp8Tensor::block_scale<ExactMath>(row_amax, ScalePair{}, rules);
    rules_.multiplier = scale.multiplier;
    *target.row_scale = canonical_nan(scale.stored);
    return;
  }
  if (!needs_row_amax()) return;
  const auto scale = Nvfp4PerToken::row_scale<ExactMath>(row_amax, kTokenBaseDecodeScale);
  pair_ = scale.pair;
  *target.row_scale = canonical_nan(scale.stored);
}

void RowEncoder::encode(const float* x, int64_t col, int64_t count, const RowTarget& target) const {
  const RowColumns columns{x, col, count};
  switch (rules_.format) {
    case RowFormat::kBf16:
      return narrow(DType::kBF16, x, count, target.values + 2 * col);
    case RowFormat::kFp32:
      return narrow(DType::kF32, x, count, target.values + 4 * col);
    case RowFormat::kFp8Static:
    case RowFormat::kFp8Token:
      return encode_values<Fp8Tensor, ExactMath>(x, count, rules_.multiplier, target.values + col);
    case RowFormat::kFp8Group:
      return encode_blocks<Fp8Block1x128>(rules_, pair_, columns, target);
    case RowFormat::kMxfp8:
      return encode_blocks<Mxfp8>(rules_, pair_, columns, target);
    case RowFormat::kNvfp4:
      return encode_blocks<Nvfp4>(rules_, pair_, columns, target);
    case RowFormat::kNvfp4PerToken:
      return encode_blocks<Nvfp4PerToken>(rules_, pair_, columns, target);
  }
}

void encode_row(const RowRules& rules, const float* x, int64_t cols, const RowTarget& target) {
  RowEncoder encoder(rules);
  AbsMax amax;
  if (encoder.needs_row_amax()) amax.add(x, cols);
  encoder.start_row(amax.or_zero(), target);
  encoder.encode(x, 0, cols, target);
}

}  // namespace narrowfloat
