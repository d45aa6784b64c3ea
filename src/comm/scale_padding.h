// The rows that pad the scales of an all-reduce, which are written as zero (spec 8.2), in
// words of four bytes: four byte scales of a swizzled row, or four exponents of FP8 groups.
#pragma once

#include "comm/allreduce_args.h"
#include "tensor/layouts/registry.h"

namespace narrowfloat {

struct ScalePadRows {
  int64_t rows = 0;  // They follow the logical rows.
  int64_t words_per_row = 0;
};

// The offset of word `column` of a row in scale_out, in words. `row` may be a pad row.
NF_HOST_DEVICE constexpr int64_t scale_word_offset(const EpilogueArgs& args, int64_t row,
                                                   int64_t column) {
  if (args.quantization == AllReduceQuantization::kFp8GroupUe8m0) {
    return column * round_up(args.tokens, int64_t{4}) + row;
  }
  return AllLayouts::offset(args.scale_layout, row, 4 * column, args.scale_extents) / 4;
}

NF_HOST_DEVICE constexpr ScalePadRows scale_pad_rows(const EpilogueArgs& args) {
  const auto padding = [&](int64_t tile) { return round_up(args.tokens, tile) - args.tokens; };
  const int64_t word_columns = ceil_div(args.scale_extents.blocks, int64_t{4});
  switch (args.quantization) {
    case AllReduceQuantization::kFp8GroupUe8m0:
      return {padding(4), word_columns};
    case AllReduceQuantization::kNvfp4:
    case AllReduceQuantization::kNvfp4PerToken:
    case AllReduceQuantization::kMxfp8:
    case AllReduceQuantization::kMxfp4:
      if (args.scale_layout == ScaleLayoutId::kSwizzled128x4) return {padding(128), word_columns};
      if (args.scale_layout == ScaleLayoutId::kSwizzled8x4) return {padding(8), word_columns};
      return {};
    case AllReduceQuantization::kNone:
    case AllReduceQuantization::kFp8Tensor:
    case AllReduceQuantization::kFp8Token:
    case AllReduceQuantization::kFp8Block1x128:
      return {};
  }
  return {};
}

}  // namespace narrowfloat
