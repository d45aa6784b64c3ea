// The kernels whose CTAs quantize one row after another (quantize_stream.cuh), on more rows than a
// GPU of up to 144 SMs holds CTAs: with three rows, a CTA uses all slots of its ring again. Also on
// every length of a row that has a tree of sums of its own. The oracle judges every byte.
#include <array>
#include <vector>

#include <gtest/gtest.h>

#include "cuda/gpu_test.h"
#include "cuda/quantize_oracle.h"

namespace narrowfloat::testing {
namespace {

struct Shape {
  int64_t rows;
  int64_t cols;
};
// An SM holds 32 CTAs of such rows,
constexpr Shape kManyBlocks{.rows = 9300, .cols = 64};
// 10 of these (which makes two rows for each CTA),
constexpr Shape kSeveralWarps{.rows = 1500, .cols = 1056};
// and 5, 2 and 1 of the following.
constexpr std::array<Shape, 3> kFewBlocks{{{1450, 2880}, {600, 7168}, {300, 16384}}};

// The source of NVFP4's encode scale.
enum class ScaleFrom { kFormat, kHost, kDevice };

// A kind of kernel, without layout, math mode and input type.
struct Kind {
  FormatId format;
  RowSourceKind source;
  ScaleFrom scale = ScaleFrom::kFormat;
};
constexpr std::array<Kind, 10> kKinds{{
    {FormatId::kNvfp4, RowSourceKind::kRmsNorm, ScaleFrom::kHost},
    {FormatId::kNvfp4, RowSourceKind::kRmsNorm, ScaleFrom::kDevice},
    // From maxima: the second of two kernels.
    {FormatId::kNvfp4, RowSourceKind::kRmsNorm},
    {FormatId::kNvfp4, RowSourceKind::kAddRmsNorm},
    {FormatId::kNvfp4PerToken, RowSourceKind::kRmsNorm},
    {FormatId::kNvfp4PerToken, RowSourceKind::kSiluMul},
    {FormatId::kNvfp4PerToken, RowSourceKind::kSmooth},
    {FormatId::kMxfp4, RowSourceKind::kRmsNorm},
    {FormatId::kMxfp8, RowSourceKind::kRmsNorm},
    {FormatId::kFp8Block1x128, RowSourceKind::kRmsNorm},
}};

constexpr std::array kLayouts = {ScaleLayoutId::kLinear, ScaleLayoutId::kSwizzled128x4,
                                 ScaleLayoutId::kSwizzled8x4, ScaleLayoutId::kMnMajor};
constexpr std::array kModes = {MathMode::kExact, MathMode::kFast};
constexpr std::array kTypes = {DType::kBF16, DType::kF16};

// The next larger number of whole blocks.
QuantizeCase case_of(const Kind& kind, const Shape& shape) {
  const int64_t block = format_info(kind.format).block_cols;
  QuantizeCase test_case =
      make_case(kind.format, kind.source, shape.rows, (shape.cols + block - 1) / block * block);
  if (kind.scale == ScaleFrom::kHost) test_case.encode_scale = 300.0F;
  if (kind.scale == ScaleFrom::kDevice) test_case.encode_scales = {300.0F};
  return test_case;
}

// All layouts, modes and types of a kind.
std::vector<QuantizeCase> variants_of(const Kind& kind, const Shape& shape) {
  std::vector<QuantizeCase> variants;
  for (const ScaleLayoutId layout : kLayouts) {
    if (!format_info(kind.format).allows(layout)) continue;
    for (const MathMode math : kModes) {
      for (const DType dtype : kTypes) {
        if (kind.source == RowSourceKind::kSmooth && dtype != DType::kBF16) continue;
        QuantizeCase test_case = case_of(kind, shape);
        test_case.layout = layout;
        test_case.math = math;
        test_case.dtype = dtype;
        variants.push_back(test_case);
      }
    }
  }
  return variants;
}

class QuantizeStreamCuda : public GpuTest {};

TEST_F(QuantizeStreamCuda, EveryKindTakesSeveralRowsForABlockOfThreads) {
  for (const Kind& kind : kKinds) {
    for (const QuantizeCase& test_case : variants_of(kind, kManyBlocks)) {
      expect_oracle(test_case, "rows");
    }
  }
}

// One variant of each kind at each width, another one each time: all would take minutes.
TEST_F(QuantizeStreamCuda, WideRowsToo) {
  size_t next = 0;
  for (const Shape& shape : kFewBlocks) {
    for (const Kind& kind : kKinds) {
      const std::vector<QuantizeCase> variants = variants_of(kind, shape);
      expect_oracle(variants[next++ * 5 % variants.size()], "rows");
    }
  }
}

// The least and the largest magnitudes: blocks and rows that leave the fast path.
TEST_F(QuantizeStreamCuda, BlocksOutOfTheOrdinaryInSeveralRows) {
  for (const Kind& kind : kKinds) {
    for (const Fill fill : {Fill::kExtremes, Fill::kSpecials}) {
      QuantizeCase test_case = case_of(kind, kSeveralWarps);
      test_case.fill = fill;
      expect_oracle(test_case, "rows");
    }
  }
}

// A norm that stores its output has other kernels. Bytes of MXFP8 show more of a sum than codes of
// 4 bits, which one after another have rows of every number of runs.
TEST_F(QuantizeStreamCuda, SumsOfSquaresAreTheTreeForEveryLength) {
  for (const FormatId format : {FormatId::kNvfp4, FormatId::kMxfp8}) {
    const int64_t block = format_info(format).block_cols;
    for (int64_t cols = 64; cols <= 2064; cols += block) {
      for (const Fill fill : {Fill::kNormal, Fill::kExtremes}) {
        QuantizeCase test_case =
            case_of({format, RowSourceKind::kRmsNorm,
                     format == FormatId::kNvfp4 ? ScaleFrom::kHost : ScaleFrom::kFormat},
                    {.rows = 5, .cols = cols});
        test_case.fill = fill;
        expect_oracle(test_case, "rows");
      }
    }
  }
}

// The cases are few enough for compute-sanitizer: rows of several warps, whose statistics share
// memory, and more of them than there are CTAs.
TEST_F(QuantizeStreamCuda, AFewCasesForTheSanitizer) {
  for (const RowSourceKind source : {RowSourceKind::kRmsNorm, RowSourceKind::kSiluMul}) {
    expect_oracle(case_of({FormatId::kNvfp4PerToken, source}, kSeveralWarps), "rows");
  }
  expect_oracle(case_of({FormatId::kMxfp8, RowSourceKind::kRmsNorm}, kSeveralWarps), "rows");
}

}  // namespace
}  // namespace narrowfloat::testing
