// Every implementation of combine against cpu_reference: the same bits, nothing else written.
#include <algorithm>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "conformance/case_sampling.h"
#include "conformance/coverage.h"
#include "narrowfloat/error.h"
#include "ops/combine/combine_problem.h"
#include "support/device_copies.h"
#include "support/environment.h"
#include "support/tensors.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kCombineCases = 200;

struct CombineCase {
  int64_t tokens, slots, rows, hidden, cols, gap;
  DType weights, out;
  bool has_weights;
  Fill fill;
  int non_local_percent;
};

CombineCase sample_combine(Random& random) {
  CombineCase c{};
  c.tokens = std::min<int64_t>(sample_rows(random), 200);
  c.slots = random.pick<int64_t>({1, 2, 3, 8, 9, 22});
  c.rows = random.range(1, 100);
  c.hidden = device_gap(random.chance(50) ? random.range(0, 70) : sample_cols(random, 1));
  while (c.tokens * c.slots * c.hidden > 100000) c.tokens /= 2;
  c.cols = random.chance(70) ? c.hidden : random.range(0, c.hidden);
  c.gap = random.chance(30) ? random.range(1, 40) : 0;
  c.gap = device_gap(c.cols + c.gap) - c.cols;
  c.weights = random.pick({DType::kF32, DType::kBF16});
  c.has_weights = random.chance(85);
  c.out = random.pick({DType::kF32, DType::kF16, DType::kBF16});
  c.fill = static_cast<Fill>(random.range(0, kNumFills - 1));
  c.non_local_percent = random.pick({0, 20, 90, 100});
  return c;
}

// The inputs of a case, and runs over them.
class CombineRun {
 public:
  CombineRun(const CombineCase& c, DType rows, Random& random, const BufferStyle& style)
      : case_(c),
        style_(style),
        slot_rows_(Matrix::filled({.dtype = rows, .rows = c.rows, .cols = c.hidden}, c.fill,
                                  random.bits(), style)),
        slot_to_row_(DType::kI32, c.tokens * c.slots, {.guard = style.guard}),
        weights_(c.weights, c.tokens * c.slots, {.guard = style.guard}) {
    for (int32_t& row : slot_to_row_.buffer().span<int32_t>()) {
      row = random.chance(c.non_local_percent) ? -1
                                               : static_cast<int32_t>(random.range(0, c.rows - 1));
    }
    const Fill fill = random.chance(30) ? c.fill : Fill::kNormal;
    fill_elements(fill, c.weights, random, c.tokens * c.slots, weights_.buffer().data());
  }

  // Everything in the output's buffer, gaps too.
  [[nodiscard]] std::vector<uint8_t> run(std::string_view implementation, bool on_host) const {
    const Matrix out(
        {.dtype = case_.out, .rows = case_.tokens, .cols = case_.cols, .gap = case_.gap}, style_);
    const DeviceCopies device(
        {&slot_rows_.buffer(), &slot_to_row_.buffer(), &weights_.buffer(), &out.buffer()},
        {.on_host = on_host, .programmatic_launch = style_.guard == Guard::kPage});
    const ForcedImplementation forced("combine", implementation);
    combine(device.view(slot_rows_.view()), device.view(slot_to_row_.view()),
            case_.has_weights ? device.view(weights_.view()) : TensorView{},
            device.view(out.view()), device.stream());
    EXPECT_TRUE(device.take_back());
    EXPECT_TRUE(out.buffer().intact() && slot_rows_.buffer().intact());
    return out.buffer().copy();
  }

 private:
  CombineCase case_;
  BufferStyle style_;
  Matrix slot_rows_;
  Vector slot_to_row_;
  Vector weights_;
};

class CombineConformance : public DeviceTest<DType> {};

TEST_P(CombineConformance, EveryImplementationGivesTheReferencesBits) {
  Coverage coverage;
  for_cases(kCombineCases, [&](int64_t index) {
    Random random(case_seed("combine" + std::string(name(GetParam())), index));
    const CombineCase c = sample_combine(random);
    for (const Guard guard : {Guard::kCanary, Guard::kPage}) {
      const CombineRun run(c, GetParam(), random,
                           {.poison = guard == Guard::kPage ? uint8_t{0xFF} : uint8_t{0xCC},
                            .guard = guard,
                            .misalignment = 4});
      const std::vector<uint8_t> expected = run.run("cpu_reference", true);
      for (const CombineImpl& impl : combine_impls()) {
        if (!is_for_device(impl.name)) continue;
        const std::string note = fmt::format(
            "{}\n  {}x{} slots, {} rows of {} {}, weights {}, out {} of {} gap {}",
            repro_line("combine", impl.name, index), c.tokens, c.slots, c.rows, c.hidden,
            name(c.fill), c.has_weights ? name(c.weights) : "absent", name(c.out), c.cols, c.gap);
        set_crash_note(note.c_str());
        try {
          EXPECT_TRUE(run.run(impl.name, false) == expected) << note;
          coverage.ran(impl.name);
        } catch (const Error& error) {
          ASSERT_EQ(error.kind(), ErrorKind::kUnsupported) << error.what() << "\n" << note;
          coverage.refused(impl.name, error.what());
        }
      }
    }
    coverage.end_case(true, name(GetParam()));
  });
  coverage.report(name(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(All, CombineConformance,
                         ::testing::Values(DType::kF32, DType::kF16, DType::kBF16),
                         [](const auto& test) { return std::string(name(test.param)); });

TEST(CombineImplementations, EndWithTheOracle) {
  ASSERT_FALSE(combine_impls().empty());
  EXPECT_EQ(combine_impls().back().name, "cpu_reference");
}

}  // namespace
}  // namespace narrowfloat::testing
