// Quantization of a token's norm, with the formats' own rules in exact mode: the bytes of the
// public quantizers.
#include "ops/allreduce/cpu_row.h"

#include <algorithm>

#include "comm/fp8_scales.h"
#include "comm/scale_padding.h"
#include "formats/registry.h"
#include "tensor/encode_row_blocks.h"
#include "tensor/row_encoder.h"

namespace narrowfloat {
namespace {

class QuantizedRow {
 public:
  QuantizedRow(const EpilogueArgs& args, int64_t token, const float* norm)
      : args_(args), token_(token), norm_(norm) {}

  void store_fp8_tensor() const {
    const float factor = Fp8Tensor::given_scale(*args_.global_scale).multiplier;
    for (int64_t i = 0; i < args_.hidden; ++i) row()[i] = E4M3::encode(mul_rn(norm_[i], factor));
  }

  void store_fp8_token() const {
    const float scale = fp8_token_scale(amax(0, args_.hidden));
    args_.row_scale_out[token_] = scale;
    for (int64_t i = 0; i < args_.hidden; ++i) row()[i] = E4M3::encode(div_rn(norm_[i], scale));
  }

  // Byte p of word (token, c) is the exponent of group 4c + p; the bytes after the last are zero.
  void store_fp8_groups() const {
    auto* const words = static_cast<uint32_t*>(args_.scale_out);
    const int64_t groups = args_.hidden / args_.group;
    for (int64_t first = 0; first < groups; first += 4) {
      uint32_t word = 0;
      for (int64_t group = first; group < std::min(first + 4, groups); ++group) {
        word |= uint32_t{store_fp8_group(group)} << (group % 4 * 8);
      }
      words[scale_word_offset(args_, token_, first / 4)] = word;
    }
  }

  template <BlockFormat Format>
  void store_blocks(const ScalePair& pair) const {
    using Stored = typename Format::Stored;
    const int64_t row_bytes = args_.hidden * Format::Element::kBits / 8;
    auto* const scales = static_cast<Stored*>(args_.scale_out);
    const auto place = [&](int64_t block) -> Stored& {
      return scales[AllLayouts::offset(args_.scale_layout, token_, block, args_.scale_extents)];
    };
    encode_row_blocks<Format>({norm_, 0, args_.hidden}, pair, args_.rules,
                              args_.quant_out + token_ * row_bytes,
                              [&](int64_t block, Stored stored) { place(block) = stored; });
    int64_t padded_blocks = 0;
    visit_layout(args_.scale_layout, [&]<typename Layout>() {
      padded_blocks = Layout::padded(args_.scale_extents).blocks;
    });
    for (int64_t block = args_.scale_extents.blocks; block < padded_blocks; ++block) {
      place(block) = Stored{0};
    }
  }

  void store_nvfp4_per_token() const {
    const auto scale =
        Nvfp4PerToken::row_scale<ExactMath>(amax(0, args_.hidden), kTokenBaseDecodeScale);
    args_.row_scale_out[token_] = canonical_nan(scale.stored);
    store_blocks<Nvfp4PerToken>(scale.pair);
  }

 private:
  [[nodiscard]] uint8_t* row() const { return args_.quant_out + token_ * args_.hidden; }

  // The largest magnitude of columns [first, first + count) that is a number.
  [[nodiscard]] float amax(int64_t first, int64_t count) const {
    AbsMax amax;
    amax.add(norm_ + first, count);
    return amax.or_zero();
  }

  // Returns the exponent.
  [[nodiscard]] uint8_t store_fp8_group(int64_t group) const {
    const int64_t first = group * args_.group;
    const uint8_t exponent = fp8_group_exponent(amax(first, args_.group));
    const float scale = bits_float(uint32_t{exponent} << 23);
    for (int64_t i = first; i < first + args_.group; ++i) {
      row()[i] = E4M3::encode(div_rn(norm_[i], scale));
    }
    return exponent;
  }

  const EpilogueArgs& args_;
  int64_t token_;
  const float* norm_;
};

void clear_pad_rows(const EpilogueArgs& args) {
  const ScalePadRows pad = scale_pad_rows(args);
  auto* const words = static_cast<uint32_t*>(args.scale_out);
  for (int64_t row = args.tokens; row < args.tokens + pad.rows; ++row) {
    for (int64_t column = 0; column < pad.words_per_row; ++column) {
      const int64_t offset = scale_word_offset(args, row, column);
      if (offset < args.scale_words) words[offset] = 0;
    }
  }
}

}  // namespace

void store_quantized_row(const EpilogueArgs& args, int64_t token, const float* norm) {
  const QuantizedRow row(args, token, norm);
  switch (args.quantization) {
    case AllReduceQuantization::kNone:
      return;
    case AllReduceQuantization::kFp8Tensor:
      return row.store_fp8_tensor();
    case AllReduceQuantization::kFp8Token:
      return row.store_fp8_token();
    case AllReduceQuantization::kFp8GroupUe8m0:
      row.store_fp8_groups();
      break;
    case AllReduceQuantization::kFp8Block1x128:
      row.store_blocks<Fp8Block1x128>(ScalePair{});
      break;
    case AllReduceQuantization::kNvfp4:
      row.store_blocks<Nvfp4>(Nvfp4::scale_pair<ExactMath>(*args.global_scale));
      break;
    case AllReduceQuantization::kNvfp4PerToken:
      row.store_nvfp4_per_token();
      break;
    case AllReduceQuantization::kMxfp8:
      row.store_blocks<Mxfp8>(ScalePair{});
      break;
    case AllReduceQuantization::kMxfp4:
      row.store_blocks<Mxfp4>(ScalePair{});
      break;
  }
  if (token == args.tokens - 1) clear_pad_rows(args);
}

}  // namespace narrowfloat
