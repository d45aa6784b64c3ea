// The CUDA quantizers by rows and by tiles on what the conformance tests' small cases do not reach:
// rows of several chunks, shapes of real models, more rows than one tuning takes, norms whose tree
// of sums ends in every way, 4-over-6 on much data, the largest batch. The oracle judges every
// byte.
#include <gtest/gtest.h>

#include "cuda/gpu_test.h"
#include "cuda/quantize_oracle.h"

namespace narrowfloat::testing {
namespace {

constexpr std::initializer_list<MathMode> kBothModes = {MathMode::kExact, MathMode::kFast};

constexpr std::initializer_list<RowSourceKind> kNorms = {RowSourceKind::kRmsNorm,
                                                         RowSourceKind::kAddRmsNorm};
constexpr std::initializer_list<RowSourceKind> kSources = {
    RowSourceKind::kPlain, RowSourceKind::kSiluMul, RowSourceKind::kSmooth, RowSourceKind::kRmsNorm,
    RowSourceKind::kAddRmsNorm};
// Around the widest rows of each tuning, and several chunks.
constexpr std::initializer_list<int64_t> kLongCols = {14336, 14400, 16384,  16416,
                                                      32768, 65536, 131072, 131136};

class QuantizeRowsCuda : public GpuTest {};
class QuantizeTilesCuda : public GpuTest {};

TEST_F(QuantizeRowsCuda, LongRowsPerToken) {
  for (const int64_t cols : kLongCols) {
    for (const MathMode math : kBothModes) {
      for (const RowSourceKind source : kSources) {
        QuantizeCase test_case = make_case(FormatId::kNvfp4PerToken, source, 3, cols);
        test_case.math = math;
        expect_oracle(test_case, "rows");
      }
      QuantizeCase test_case = make_case(FormatId::kNvfp4PerToken, RowSourceKind::kPlain, 3, cols);
      test_case.math = math;
      test_case.dtype = DType::kF32;
      expect_oracle(test_case, "rows");
    }
  }
}

TEST_F(QuantizeRowsCuda, LongRowsOfNorms) {
  for (const int64_t cols : kLongCols) {
    for (const FormatId format : {FormatId::kNvfp4, FormatId::kMxfp4, FormatId::kMxfp8,
                                  FormatId::kFp8Block1x128, FormatId::kFp8Tensor}) {
      for (const RowSourceKind source : kNorms) {
        QuantizeCase test_case = make_case(format, source, 3, cols);
        test_case.has_norm_output = true;
        test_case.dtype = cols % 64 == 0 ? DType::kBF16 : DType::kF16;
        expect_oracle(test_case, "rows");
      }
    }
  }
}

TEST_F(QuantizeRowsCuda, LongRowsOfFourOverSix) {
  for (const int64_t cols : kLongCols) {
    for (const FormatId format : {FormatId::kNvfp4, FormatId::kNvfp4PerToken}) {
      for (const RowSourceKind source : kSources) {
        QuantizeCase test_case = make_case(format, source, 2, cols);
        test_case.four_over_six.enabled = true;
        expect_oracle(test_case, "rows");
      }
    }
  }
}

TEST_F(QuantizeRowsCuda, ShapesOfModels) {
  for (const int64_t cols : {1536, 2048, 2880, 4096, 7168}) {
    for (const RowSourceKind source : kSources) {
      for (const ScaleLayoutId layout :
           {ScaleLayoutId::kLinear, ScaleLayoutId::kSwizzled128x4, ScaleLayoutId::kSwizzled8x4}) {
        QuantizeCase test_case = make_case(FormatId::kNvfp4PerToken, source, 131, cols);
        test_case.layout = layout;
        expect_oracle(test_case, "rows");
      }
    }
    for (const RowSourceKind source : kNorms) {
      for (const FormatId format : {FormatId::kNvfp4, FormatId::kMxfp8, FormatId::kFp8Block1x128}) {
        QuantizeCase test_case = make_case(format, source, 131, cols);
        test_case.encode_scale = format == FormatId::kNvfp4 ? std::optional(300.0F) : std::nullopt;
        expect_oracle(test_case, "rows");
      }
    }
  }
}

// More than 1024 rows have a tuning of their own.
TEST_F(QuantizeRowsCuda, ManyRows) {
  for (const int64_t cols : {64, 96, 1056}) {
    for (const MathMode math : kBothModes) {
      for (const DType dtype : {DType::kBF16, DType::kF16}) {
        for (const RowSourceKind source :
             {RowSourceKind::kPlain, RowSourceKind::kRmsNorm, RowSourceKind::kAddRmsNorm}) {
          QuantizeCase test_case = make_case(FormatId::kNvfp4PerToken, source, 1030, cols);
          test_case.math = math;
          test_case.dtype = dtype;
          expect_oracle(test_case, "rows");
        }
        for (const FormatId format : {FormatId::kNvfp4, FormatId::kMxfp4, FormatId::kMxfp8,
                                      FormatId::kFp8Block1x128, FormatId::kFp8Tensor}) {
          QuantizeCase test_case = make_case(format, RowSourceKind::kAddRmsNorm, 1030, cols);
          test_case.math = math;
          test_case.dtype = dtype;
          test_case.has_norm_output = true;
          expect_oracle(test_case, "rows");
        }
      }
    }
  }
}

// Every number of leaves of the sum of squares up to several warps.
TEST_F(QuantizeRowsCuda, SumsOfSquaresAreTheTreeForEveryLength) {
  for (int64_t cols = 64; cols <= 2064; cols += 16) {
    for (const Fill fill : {Fill::kNormalRows, Fill::kExtremes}) {
      QuantizeCase test_case =
          make_case(FormatId::kFp8Block1x128, RowSourceKind::kRmsNorm, 5, cols);
      test_case.fill = fill;
      test_case.has_norm_output = true;
      expect_oracle(test_case, "rows");
    }
  }
}

TEST_F(QuantizeRowsCuda, FourOverSixOnMuchData) {
  for (const MathMode math : kBothModes) {
    for (const FormatId format : {FormatId::kNvfp4, FormatId::kNvfp4PerToken}) {
      for (const auto error : {FourOverSixError::kMae, FourOverSixError::kMse}) {
        for (const auto error_math : {FourOverSixMath::kStrict, FourOverSixMath::kFast}) {
          for (int fill = 0; fill < kNumFills; ++fill) {
            QuantizeCase test_case = make_case(format, RowSourceKind::kPlain, 40, 4096);
            test_case.math = math;
            test_case.fill = static_cast<Fill>(fill);
            test_case.dtype = fill % 2 == 0 ? DType::kBF16 : DType::kF16;
            test_case.four_over_six = {.enabled = true,
                                       .error = error,
                                       .error_math = error_math,
                                       .e4m3_max = fill % 3 == 0 ? 256 : 448};
            expect_oracle(test_case, "rows");
          }
        }
      }
    }
  }
}

TEST_F(QuantizeRowsCuda, LargestBatch) {
  QuantizeCase test_case = make_case(FormatId::kNvfp4PerToken, RowSourceKind::kPlain, 1, 64);
  test_case.layout = ScaleLayoutId::kLinear;
  test_case.batch = 65535;
  expect_oracle(test_case, "rows");
}

TEST_F(QuantizeTilesCuda, PartialTilesAtBothEdges) {
  for (const int64_t rows : {1, 64, 127, 128, 129, 300}) {
    for (const int64_t cols : {64, 112, 128, 144, 272, 1536}) {
      for (const RowSourceKind source : kSources) {
        for (const MathMode math : kBothModes) {
          QuantizeCase test_case = make_case(FormatId::kFp8Block128x128, source, rows, cols);
          test_case.batch = rows < 128 ? 3 : 1;
          test_case.math = math;
          test_case.dtype =
              source == RowSourceKind::kSmooth || cols % 128 == 0 ? DType::kBF16 : DType::kF16;
          expect_oracle(test_case, "tiles");
        }
      }
      QuantizeCase test_case =
          make_case(FormatId::kFp8Block128x128, RowSourceKind::kPlain, rows, cols);
      test_case.dtype = DType::kF32;
      expect_oracle(test_case, "tiles");
    }
  }
}

TEST_F(QuantizeTilesCuda, ShapesOfModels) {
  for (const int64_t cols : {2048, 2880, 7168}) {
    expect_oracle(make_case(FormatId::kFp8Block128x128, RowSourceKind::kPlain, 576, cols), "tiles");
    expect_oracle(make_case(FormatId::kFp8Block128x128, RowSourceKind::kAddRmsNorm, 300, cols),
                  "tiles");
  }
}

TEST_F(QuantizeTilesCuda, LargestBatch) {
  QuantizeCase test_case = make_case(FormatId::kFp8Block128x128, RowSourceKind::kPlain, 1, 16);
  test_case.batch = 65535;
  expect_oracle(test_case, "tiles");
}

}  // namespace
}  // namespace narrowfloat::testing
