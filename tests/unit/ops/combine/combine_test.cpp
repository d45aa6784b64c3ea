// The combine against a loop of fma over single elements, hand cases that tell a fused
// multiply-add from its imitations, the edge cases of moe spec 1.7, and every check at its door.
#include "narrowfloat/combine.h"

#include <cmath>
#include <ostream>
#include <vector>

#include <gtest/gtest.h>

#include "base/host_device.h"
#include "support/environment.h"
#include "support/expect_error.h"
#include "support/special_floats.h"
#include "support/tensors.h"

namespace narrowfloat::testing {
namespace {

// The buffers of a call.
struct Inputs {
  Matrix slot_rows;
  Vector slot_to_row;
  Vector weights;
  [[nodiscard]] int64_t tokens(int64_t slots) const {
    return slot_to_row.view().num_elements() / slots;
  }
};

struct OutShape {
  DType dtype = DType::kF32;
  int64_t tokens = 1;
  int64_t cols = 1;
  int64_t gap = 0;
};

Matrix combined(const Inputs& inputs, const OutShape& shape) {
  Matrix out({.dtype = shape.dtype, .rows = shape.tokens, .cols = shape.cols, .gap = shape.gap},
             {.poison = 0xFF});
  combine(inputs.slot_rows.view(), inputs.slot_to_row.view(), inputs.weights.view(), out.view());
  EXPECT_TRUE(out.buffer().intact());
  return out;
}

// One token, one column: slot s has the value values[s] and the weight weights[s].
float one(const std::vector<float>& weights, const std::vector<float>& values,
          DType rows = DType::kF32, DType out = DType::kF32) {
  const auto slots = static_cast<int64_t>(values.size());
  Inputs inputs{Matrix({.dtype = rows, .rows = slots, .cols = 1}), Vector(DType::kI32, slots),
                Vector::of(DType::kF32, weights)};
  for (int64_t s = 0; s < slots; ++s) {
    inputs.slot_rows.set(s, 0, values[static_cast<size_t>(s)]);
    inputs.slot_to_row.buffer().data<int32_t>()[s] = static_cast<int32_t>(s);
  }
  return combined(inputs, {.dtype = out}).at(0, 0);
}

TEST(Combine, AddsWeightedRowsInSlotOrder) {
  Inputs inputs{Matrix({.dtype = DType::kBF16, .rows = 3, .cols = 2}),
                Vector::of<int32_t>(DType::kI32, {2, 0,  //
                                                  -1, 1}),
                Vector::of<float>(DType::kF32, {0.5F, 3.0F, 100.0F, -2.0F})};
  for (int64_t row = 0; row < 3; ++row) {
    inputs.slot_rows.set(row, 0, static_cast<float>(row + 1));
    inputs.slot_rows.set(row, 1, static_cast<float>(10 * row + 10));
  }
  const Matrix out = combined(inputs, {.dtype = DType::kBF16, .tokens = 2, .cols = 2});
  EXPECT_EQ(out.at(0, 0), 4.5F);
  EXPECT_EQ(out.at(0, 1), 45.0F);
  EXPECT_EQ(out.at(1, 0), -4.0F);
  EXPECT_EQ(out.at(1, 1), -40.0F);
  // 2^24 swallows a 1 that comes after it, not one that comes before it with another.
  EXPECT_EQ(one({1, 1, 1}, {0x1p24F, 1, 1}), 0x1p24F);
  EXPECT_EQ(one({1, 1, 1}, {1, 1, 0x1p24F}), 0x1p24F + 2);
}

TEST(Combine, FusesMultiplyAndAdd) {
  const float odd = 1.0F + 0x1p-23F;
  // The product is 2^-24 (1 - 2^-32), just under half a step: rounding it first makes a tie, which
  // goes to even, and so does a sum in double.
  EXPECT_EQ(one({1.0F, 0x1p-12F * (1 - 0x1p-16F)}, {odd, 0x1p-12F * (1 + 0x1p-16F)}), odd);
  // The same from bf16 rows: 5237765 * 205 = 2^30 + 1, just over half a step.
  EXPECT_EQ(one({1.0F, 5237765.0F * 0x1p-27F}, {1.0F, 205.0F * 0x1p-27F}, DType::kBF16), odd);
  EXPECT_EQ(one({1.0F, -5237765.0F * 0x1p-27F}, {-1.0F, 205.0F * 0x1p-27F}, DType::kBF16), -odd);
  // Products below the range of fp32 still count.
  EXPECT_EQ(one({0x1p-100F, 1.0F}, {0x1p-49F, -0x1p-149F}), 0.0F);
  EXPECT_EQ(one({1.0F, 0x1p-100F}, {0x1p-149F, 0x1.8p-50F}), 0x1p-148F);
}

TEST(Combine, RoundsOnceToTheOutput) {
  // 1 + 4 * 2^-9: each step alone rounds back to 1 in bf16.
  EXPECT_EQ(
      one({1, 1, 1, 1, 1}, {1, 0x1p-9F, 0x1p-9F, 0x1p-9F, 0x1p-9F}, DType::kBF16, DType::kBF16),
      1.0F + 0x1p-7F);
  EXPECT_EQ(one({1, 1}, {1.0F, 0x1p-8F}, DType::kBF16, DType::kBF16), 1.0F);
  EXPECT_EQ(one({1}, {65519.0F}, DType::kF32, DType::kF16), 65504.0F);
  EXPECT_EQ(one({1}, {65520.0F}, DType::kF32, DType::kF16), kFloatInfinity);
  EXPECT_EQ(one({1, 1}, {65504.0F, 16.0F}, DType::kF16, DType::kF16), kFloatInfinity);
  EXPECT_EQ(one({1, 1, 1}, {65504.0F, 16.0F, -16.0F}, DType::kF16, DType::kF16), 65504.0F);
}

TEST(Combine, GivesPositiveZeroWhereThereIsNothingToAdd) {
  EXPECT_EQ(float_bits(one({-1.0F}, {0.0F})), 0U);
  EXPECT_EQ(float_bits(one({1.0F, 1.0F}, {1.0F, -1.0F})), 0U);
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    Inputs inputs{
        Matrix::filled({.dtype = DType::kBF16, .rows = 1, .cols = 3}, Fill::kOnlySpecials, 1),
        Vector::of<int32_t>(DType::kI32, {-1, -1}),
        Vector::of<float>(DType::kF32, {kFloatNan, kFloatInfinity})};
    const Matrix out = combined(inputs, {.dtype = dtype, .cols = 3});
    EXPECT_EQ(out.elements(), std::vector<uint8_t>(out.elements().size(), 0));
  }
}

TEST(Combine, IsPlainArithmeticForSpecialWeightsAndValues) {
  // A zero weight does not skip its slot.
  EXPECT_TRUE(std::isnan(one({1.0F, 0.0F}, {1.0F, kFloatInfinity})));
  EXPECT_TRUE(std::isnan(one({0.0F}, {kFloatNan})));
  EXPECT_TRUE(std::isnan(one({kFloatInfinity, -kFloatInfinity}, {1.0F, 1.0F})));
  EXPECT_EQ(one({-kFloatInfinity, 1.0F}, {2.0F, 5.0F}), -kFloatInfinity);
  EXPECT_EQ(one({1e30F, 1e30F}, {1e30F, -1e30F}), kFloatInfinity);
  EXPECT_EQ(one({-1e30F}, {1e-30F}), -1e30F * 1e-30F);
  EXPECT_EQ(one({0x1p-149F}, {0x1p100F}), 0x1p-49F);
}

TEST(Combine, WritesOneNan) {
  const std::vector<std::pair<DType, uint32_t>> canonical{
      {DType::kF32, 0x7FFFFFFFU}, {DType::kBF16, 0x7FFFU}, {DType::kF16, 0x7FFFU}};
  for (const auto& [dtype, bits] : canonical) {
    for (const uint32_t nan : {0x7F800001U, 0xFFC00000U, 0x7FC12345U, 0xFF812345U}) {
      Inputs inputs{Matrix({.dtype = DType::kF32, .rows = 1, .cols = 2}),
                    Vector::of<int32_t>(DType::kI32, {0}), Vector::of<float>(DType::kF32, {2.0F})};
      inputs.slot_rows.set(0, 0, bits_float(nan));
      inputs.slot_rows.set(0, 1, 1.0F);
      const Matrix out = combined(inputs, {.dtype = dtype, .cols = 2});
      const uint32_t written = dtype == DType::kF32 ? *static_cast<const uint32_t*>(out.row(0))
                                                    : *static_cast<const uint16_t*>(out.row(0));
      EXPECT_EQ(written, bits);
      EXPECT_EQ(out.at(0, 1), 2.0F);
    }
  }
}

struct Shape {
  int64_t tokens = 0;
  int64_t slots = 1;
  int64_t rows = 1;
  int64_t hidden = 1;
};

Inputs random_inputs(const Shape& shape, DType rows, DType weights, Fill fill) {
  Random random(static_cast<uint64_t>(shape.tokens * 31 + shape.hidden));
  Inputs inputs{Matrix::filled({.dtype = rows, .rows = shape.rows, .cols = shape.hidden}, fill, 5),
                Vector(DType::kI32, shape.tokens * shape.slots),
                Vector(weights, shape.tokens * shape.slots)};
  for (int32_t& row : inputs.slot_to_row.buffer().span<int32_t>()) {
    row = random.chance(20) ? -1 : static_cast<int32_t>(random.range(0, shape.rows - 1));
  }
  fill_elements(fill, weights, random, shape.tokens * shape.slots, inputs.weights.buffer().data());
  return inputs;
}

// Widened by shifting, one element at a time.
void expect_fma_loop(const Inputs& inputs, const Shape& shape, const Matrix& out) {
  const auto* rows = inputs.slot_to_row.buffer().data<int32_t>();
  for (int64_t t = 0; t < shape.tokens; ++t) {
    for (int64_t o = 0; o < out.shape().cols; ++o) {
      float sum = 0.0F;
      for (int64_t i = t * shape.slots; i < (t + 1) * shape.slots; ++i) {
        if (rows[i] < 0) continue;
        const float w =
            load_element(inputs.weights.view().dtype, inputs.weights.buffer().data(), i);
        sum = std::fma(w, inputs.slot_rows.at(rows[i], o), sum);
      }
      const uint32_t expected = std::isnan(sum)
                                    ? 0x7FFFFFFFU >> (out.shape().dtype == DType::kF32 ? 0 : 16)
                                    : element_bits(out.shape().dtype, sum);
      uint32_t got = 0;
      if (out.shape().dtype == DType::kF32) {
        got = static_cast<const uint32_t*>(out.row(t))[o];
      } else {
        got = static_cast<const uint16_t*>(out.row(t))[o];
      }
      ASSERT_EQ(got, expected) << "token " << t << " column " << o;
    }
  }
}

TEST(Combine, EqualsALoopOfFmaForEveryTypeAndImplementation) {
  const Shape shape{.tokens = 9, .slots = 5, .rows = 40, .hidden = 1031};
  for (const char* implementation : {"cpu_baseline", "cpu_reference"}) {
    const ForcedImplementation forced("combine", implementation);
    for (const DType rows : {DType::kBF16, DType::kF16, DType::kF32}) {
      for (const DType weights : {DType::kF32, DType::kBF16}) {
        for (const DType out : {DType::kBF16, DType::kF16, DType::kF32}) {
          for (const Fill fill : {Fill::kNormal, Fill::kSpecials, Fill::kRandomBits}) {
            const Inputs inputs = random_inputs(shape, rows, weights, fill);
            expect_fma_loop(inputs, shape, combined(inputs, {out, shape.tokens, shape.hidden}));
          }
        }
      }
    }
  }
}

TEST(Combine, IsExactForIntegers) {
  const Shape shape{.tokens = 33, .slots = 8, .rows = 100, .hidden = 77};
  const Inputs inputs = random_inputs(shape, DType::kBF16, DType::kF32, Fill::kNormal);
  Random random(9);
  for (int64_t row = 0; row < shape.rows; ++row) {
    for (int64_t col = 0; col < shape.hidden; ++col) {
      inputs.slot_rows.set(row, col, static_cast<float>(random.range(-256, 256)));
    }
  }
  std::vector<int64_t> quarters;  // Weights in units of 1/4.
  for (float& weight : inputs.weights.buffer().span<float>()) {
    quarters.push_back(random.range(-40, 40));
    weight = static_cast<float>(quarters.back()) / 4.0F;
  }
  const Matrix out = combined(inputs, {DType::kF32, shape.tokens, shape.hidden});
  for (int64_t t = 0; t < shape.tokens; ++t) {
    for (int64_t o = 0; o < shape.hidden; ++o) {
      int64_t sum = 0;
      for (int64_t i = t * shape.slots; i < (t + 1) * shape.slots; ++i) {
        const int32_t row = inputs.slot_to_row.buffer().data<int32_t>()[i];
        if (row < 0) continue;
        sum += quarters[static_cast<size_t>(i)] * static_cast<int64_t>(inputs.slot_rows.at(row, o));
      }
      ASSERT_EQ(out.at(t, o), static_cast<float>(sum) / 4.0F);
    }
  }
}

TEST(Combine, TakesAbsentWeightsAsOne) {
  const Shape shape{.tokens = 6, .slots = 3, .rows = 20, .hidden = 50};
  const Inputs inputs = random_inputs(shape, DType::kBF16, DType::kF32, Fill::kNormal);
  for (float& weight : inputs.weights.buffer().span<float>()) weight = 1.0F;
  const Matrix expected = combined(inputs, {DType::kF32, shape.tokens, shape.hidden});
  const Matrix out({.dtype = DType::kF32, .rows = shape.tokens, .cols = shape.hidden});
  combine(inputs.slot_rows.view(), inputs.slot_to_row.view(), {}, out.view());
  EXPECT_EQ(out.elements(), expected.elements());
}

TEST(Combine, DropsTheLastColumnsAndLeavesGapsAlone) {
  const Shape shape{.tokens = 5, .slots = 2, .rows = 8, .hidden = 1300};
  const Inputs inputs = random_inputs(shape, DType::kBF16, DType::kF32, Fill::kNormal);
  for (const int64_t cols : {int64_t{1}, int64_t{1024}, int64_t{1025}, int64_t{1299}}) {
    const Matrix out = combined(inputs, {DType::kBF16, shape.tokens, cols, 7});
    expect_fma_loop(inputs, shape, out);
    for (int64_t t = 0; t + 1 < shape.tokens; ++t) {
      for (int64_t i = 0; i < 7; ++i) {
        EXPECT_EQ(static_cast<const uint16_t*>(out.row(t))[cols + i], 0xFFFFU);
      }
    }
  }
}

TEST(Combine, KeepsANanInItsToken) {
  const Shape shape{.tokens = 4, .slots = 2, .rows = 8, .hidden = 30};
  Inputs inputs = random_inputs(shape, DType::kBF16, DType::kF32, Fill::kNormal);
  for (int32_t i = 0; i < 8; ++i) inputs.slot_to_row.buffer().data<int32_t>()[i] = i;
  const Matrix clean = combined(inputs, {DType::kF32, 4, 30});
  // Both rows of token 2.
  inputs.slot_rows.poison_row(4, 0xFF);
  inputs.slot_rows.poison_row(5, 0xFF);
  const Matrix out = combined(inputs, {DType::kF32, 4, 30});
  for (int64_t t = 0; t < 4; ++t) {
    for (int64_t o = 0; o < 30; ++o) {
      if (t == 2) {
        EXPECT_TRUE(std::isnan(out.at(t, o)));
      } else {
        EXPECT_EQ(out.at(t, o), clean.at(t, o));
      }
    }
  }
}

TEST(Combine, ReadsOnlyRowsThatASlotNames) {
  const Shape shape{.tokens = 3, .slots = 2, .rows = 9, .hidden = 20};
  Inputs inputs = random_inputs(shape, DType::kF32, DType::kF32, Fill::kNormal);
  for (int32_t i = 0; i < 6; ++i) inputs.slot_to_row.buffer().data<int32_t>()[i] = i + 1;
  for (const int64_t padding : {0, 7, 8}) inputs.slot_rows.poison_row(padding, 0xFF);
  const Matrix out = combined(inputs, {DType::kF32, 3, 20});
  for (int64_t t = 0; t < 3; ++t) {
    for (int64_t o = 0; o < 20; ++o) EXPECT_FALSE(std::isnan(out.at(t, o)));
  }
}

TEST(Combine, DoesNotDependOnThreadsOrTheCallersFloatMode) {
  const Shape shape{.tokens = 40, .slots = 6, .rows = 200, .hidden = 2100};
  const Inputs inputs = random_inputs(shape, DType::kF32, DType::kF32, Fill::kExtremes);
  const OutShape out{DType::kF32, shape.tokens, shape.hidden};
  const std::vector<uint8_t> expected = combined(inputs, out).elements();
  for (const int threads : {1, 2, 5}) {
    const ThreadLimit limit(threads);
    for (const unsigned control : {kFlushToZero | kDenormalsAreZero, kRoundUp, kRoundToZero}) {
      for (const char* implementation : {"cpu_baseline", "cpu_reference"}) {
        const ForcedImplementation forced("combine", implementation);
        const ControlWord word(control);
        EXPECT_EQ(combined(inputs, out).elements(), expected);
      }
    }
  }
}

TEST(Combine, AcceptsEmptyExtents) {
  const TensorView no_rows = TensorView::contiguous(nullptr, DType::kBF16, {0, 16});
  combine(no_rows, TensorView::contiguous(nullptr, DType::kI32, {0}),
          TensorView::contiguous(nullptr, DType::kF32, {0, 4}),
          TensorView::contiguous(nullptr, DType::kBF16, {0, 16}));
  // No expert is local: no rows, yet every output is written.
  const Inputs inputs{Matrix(), Vector::of<int32_t>(DType::kI32, {-1, -1}), Vector()};
  const Matrix out({.dtype = DType::kBF16, .rows = 2, .cols = 16}, {.poison = 0xFF});
  combine(no_rows, inputs.slot_to_row.view(), {}, out.view());
  EXPECT_EQ(out.elements(), std::vector<uint8_t>(64, 0));
  const Matrix no_cols({.dtype = DType::kBF16, .rows = 2, .cols = 0});
  combine(no_rows, inputs.slot_to_row.view(), {}, no_cols.view());
}

// A call with one thing wrong: 6 rows of 8, 3 tokens of 2 slots.
struct CombineCall {
  TensorView slot_rows;
  TensorView slot_to_row;
  TensorView weights;
  TensorView out;
};
struct CombineViolation {
  const char* name;
  void (*apply)(CombineCall& call);
  std::vector<std::string> fragments;
};
void PrintTo(const CombineViolation& violation, std::ostream* out) { *out << violation.name; }

void set_row(CombineCall& call, int32_t value) {
  static_cast<int32_t*>(call.slot_to_row.data)[4] = value;
}

std::vector<CombineViolation> combine_violations() {
  return {
      {"RowsType", [](CombineCall& c) { c.slot_rows.dtype = DType::kF64; }, {"slot_rows", "F64"}},
      {"RowsRank", [](CombineCall& c) { c.slot_rows.rank = 1; }, {"slot_rows", "two axes"}},
      {"RowsGap", [](CombineCall& c) { c.slot_rows.strides[0] = 9; }, {"slot_rows", "dense", "9"}},
      {"RowsNull", [](CombineCall& c) { c.slot_rows.data = nullptr; }, {"slot_rows", "null"}},
      {"OutType", [](CombineCall& c) { c.out.dtype = DType::kF8E4M3; }, {"out", "F8_E4M3"}},
      {"OutRank", [](CombineCall& c) { c.out.rank = 3; }, {"out", "two axes"}},
      {"OutStride", [](CombineCall& c) { c.out.strides[1] = 2; }, {"out", "stride 1", "2"}},
      {"OutRowStride", [](CombineCall& c) { c.out.strides[0] = 7; }, {"out", "at least 8", "7"}},
      {"OutDevice",
       [](CombineCall& c) { c.out.device.type = DeviceType::kCuda; },
       {"out", "cuda:0"}},
      {"OutWide",
       [](CombineCall& c) {
         c.slot_rows = TensorView::contiguous(c.slot_rows.data, DType::kF32, {6, 7});
       },
       {"out", "at most 7", "8"}},
      {"SlotsType",
       [](CombineCall& c) { c.slot_to_row.dtype = DType::kI64; },
       {"slot_to_row", "I32"}},
      {"SlotsUneven",
       [](CombineCall& c) { c.slot_to_row.shape[0] = 5; },
       {"slot_to_row", "3 tokens"}},
      {"SlotsNone",
       [](CombineCall& c) { c.slot_to_row.shape[0] = 0; },
       {"slot_to_row", "3 tokens"}},
      {"SlotsNull", [](CombineCall& c) { c.slot_to_row.data = nullptr; }, {"slot_to_row", "null"}},
      {"RowLarge", [](CombineCall& c) { set_row(c, 6); }, {"slot_to_row", "0 to 5", "got 6 at 4"}},
      {"RowNegative",
       [](CombineCall& c) { set_row(c, -2); },
       {"slot_to_row", "-1 or", "got -2 at 4"}},
      {"WeightsType",
       [](CombineCall& c) { c.weights.dtype = DType::kF16; },
       {"weights", "F32 or BF16"}},
      {"WeightsCount", [](CombineCall& c) { c.weights.shape[0] = 5; }, {"weights", "6 values"}},
      {"WeightsNull", [](CombineCall& c) { c.weights.data = nullptr; }, {"weights", "null"}},
      {"Overlap",
       [](CombineCall& c) { c.out.data = c.slot_rows.data; },
       {"out", "overlaps", "slot_rows"}},
      {"OverlapWeights",
       [](CombineCall& c) { c.weights.data = c.out.data; },
       {"out", "overlaps", "weights"}},
  };
}

class CombineChecks : public ::testing::TestWithParam<CombineViolation> {};

TEST_P(CombineChecks, ThrowAndWriteNothing) {
  Inputs inputs = random_inputs({.tokens = 3, .slots = 2, .rows = 6, .hidden = 8}, DType::kF32,
                                DType::kF32, Fill::kNormal);
  const Matrix out({.dtype = DType::kF32, .rows = 3, .cols = 8});
  const std::vector<uint8_t> before = inputs.slot_rows.elements();
  CombineCall call{inputs.slot_rows.view(), inputs.slot_to_row.view(), inputs.weights.view(),
                   out.view()};
  GetParam().apply(call);
  expect_error(ErrorKind::kInvalidArgument, GetParam().fragments,
               [&] { combine(call.slot_rows, call.slot_to_row, call.weights, call.out); });
  EXPECT_EQ(out.elements(), std::vector<uint8_t>(96, 0xCC));
  EXPECT_EQ(inputs.slot_rows.elements(), before);
}

INSTANTIATE_TEST_SUITE_P(All, CombineChecks, ::testing::ValuesIn(combine_violations()),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace narrowfloat::testing
