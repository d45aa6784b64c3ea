// Types and sizes of activation rows.
#include "tensor/row_format.h"

#include <gtest/gtest.h>

#include "narrowfloat/error.h"

namespace narrowfloat {
namespace {

TEST(RowFormats, AreStoredAsTheirHeaderSays) {
  struct Expected {
    RowFormat format;
    DType values;
    DType scales;
    int64_t row_bytes;  // Bytes of a row of 64 columns.
    int64_t multiple;
  };
  for (const Expected& expected :
       {Expected{RowFormat::kBf16, DType::kBF16, DType::kF32, 128, 1},
        Expected{RowFormat::kFp32, DType::kF32, DType::kF32, 256, 1},
        Expected{RowFormat::kFp8Static, DType::kF8E4M3, DType::kF32, 64, 1},
        Expected{RowFormat::kFp8Group, DType::kF8E4M3, DType::kF32, 64, 1},
        Expected{RowFormat::kMxfp8, DType::kF8E4M3, DType::kF8E8M0, 64, 32},
        Expected{RowFormat::kNvfp4, DType::kU8, DType::kF8E4M3, 32, 16},
        Expected{RowFormat::kNvfp4PerToken, DType::kU8, DType::kF8E4M3, 32, 16},
        Expected{RowFormat::kFp8Token, DType::kF8E4M3, DType::kF32, 64, 1}}) {
    EXPECT_EQ(value_dtype(expected.format), expected.values) << name(expected.format);
    EXPECT_EQ(scale_dtype(expected.format), expected.scales) << name(expected.format);
    EXPECT_EQ(row_bytes(expected.format, 64), expected.row_bytes) << name(expected.format);
    EXPECT_EQ(value_cols(expected.format, 64), expected.values == DType::kU8 ? 32 : 64);
    EXPECT_EQ(column_multiple(expected.format), expected.multiple) << name(expected.format);
  }
  EXPECT_THROW(value_dtype(static_cast<RowFormat>(8)), Error);
}

}  // namespace
}  // namespace narrowfloat
