// Every implementation of grouped_gemm gives the oracle's bytes: every mode, both accumulations and
// all output types, over generated shapes, tiles, epilogues and data.
#include <ostream>

#include <gtest/gtest.h>

#include "conformance/case_sampling.h"
#include "ops/grouped_gemm/grouped_gemm_problem.h"
#include "support/gemm_case.h"
#include "support/moe_modes.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kCasesPerMode = 24;
// Products of one case: the oracle is slow.
constexpr int64_t kMaxProducts = 400'000;

int64_t sample_gemm_cols(Random& random, int64_t multiple) {
  if (multiple == 128) return random.pick({128, 256, 384, 640});
  if (multiple == 32) return random.pick({32, 96, 128, 160, 288, 2880});
  return random.pick({16, 80, 128, 144, 272, 400, 2880});
}

GemmCaseSpec sample_case(MoeMode mode, Random& random) {
  GemmCaseSpec spec{.mode = mode};
  spec.cols = sample_gemm_cols(random, moe_mode_info(mode).multiple);
  spec.weight_rows = random.pick({16, 16, 32, 48, 144, 272});
  spec.expert_rows.clear();
  const int64_t experts = random.range(1, 6);
  int64_t left = kMaxProducts / (spec.cols * spec.weight_rows);
  for (int64_t i = 0; i < experts; ++i) {
    const int64_t rows = std::min(left, random.pick<int64_t>({0, 1, 2, 3, 5, 17, 64, 300}));
    spec.expert_rows.push_back(rows);
    left -= rows;
  }
  spec.token_tile = random.pick({1, 2, 4, 8, 16, 64, 128});
  spec.gathers = random.chance(50);
  spec.fp32_rows = random.chance(30);
  spec.transposed_scales = random.chance(50);
  spec.has_slot_weights = random.chance(50);
  if (random.chance(60)) spec.bias = random.pick({DType::kF32, DType::kBF16});
  if (random.chance(60)) {
    spec.gate_order =
        random.pick({GateOrder::kUpGate, GateOrder::kGateUp, GateOrder::kInterleaved});
  }
  spec.has_scale = random.chance(60);
  spec.data = random.chance(25) ? GemmData::kBits : GemmData::kRandom;
  spec.seed = random.bits();
  return spec;
}

class GroupedGemmConformance : public ::testing::TestWithParam<MoeMode> {};

TEST_P(GroupedGemmConformance, EveryImplementationGivesTheOraclesBytes) {
  for_cases(kCasesPerMode, [&](int64_t index) {
    Random random(case_seed("grouped_gemm " + std::string(name(GetParam())), index));
    const GemmCase gemm(sample_case(GetParam(), random));
    GemmRun run{.implementation = "cpu_reference"};
    run.layout = random.pick({ScaleLayoutId::kLinear, ScaleLayoutId::kSwizzled128x4});
    if (random.chance(50)) run.accumulation = Accumulation::kFp64;
    run.output = random.pick({DType::kF32, DType::kBF16});
    if (run.accumulation == Accumulation::kFp64 && random.chance(50)) run.output = DType::kF64;
    const std::vector<uint8_t> expected = gemm.run(run);
    for (const GroupedGemmImpl& impl : grouped_gemm_impls()) {
      if (!impl.supports({.mode = GetParam()}).ok()) continue;
      const std::string note = repro_line("grouped_gemm", impl.name, index) + "\n  " +
                               to_string(gemm.spec()) + " -> " + std::string(name(run.output));
      set_crash_note(note.c_str());
      run.implementation = impl.name;
      run.workspace_poison = random.pick({uint8_t{0xFF}, uint8_t{0xCC}});
      EXPECT_EQ(gemm.run(run), expected) << note;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(All, GroupedGemmConformance, ::testing::ValuesIn(every_moe_mode()),
                         [](const auto& test) { return std::string(name(test.param)); });

TEST(GroupedGemmImplementations, EndWithTheOracle) {
  ASSERT_FALSE(grouped_gemm_impls().empty());
  EXPECT_EQ(grouped_gemm_impls().back().name, "cpu_reference");
}

}  // namespace
}  // namespace narrowfloat::testing
