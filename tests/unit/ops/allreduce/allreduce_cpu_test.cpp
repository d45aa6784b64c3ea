// The implementations on the CPU against the model: every pattern, element type and layout, with
// ranks as threads, byte for byte, and the same bytes from all algorithms.
#include <array>
#include <memory>
#include <string>

#include <fmt/format.h>
#include <gtest/gtest.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "narrowfloat/group_quantize.h"
#include "narrowfloat/quantize.h"
#include "ops/allreduce/cpu_cta.h"
#include "support/allreduce_ranks.h"
#include "support/special_floats.h"
#include "support/tensors.h"

namespace narrowfloat::testing {
namespace {

// Runs a case by one implementation and returns what is wrong on any rank.
std::string run_case(const RankGroup& group, const AllReduceImpl& impl, const GoldenInputs& in,
                     const GoldenOutputs& expected, const RankOptions& options = {}) {
  std::vector<std::string> wrong(static_cast<size_t>(group.ranks()));
  run_as_threads(group.ranks(), [&](int rank) {
    const RankTensors tensors(in, rank, options);
    run_rank(group, rank, impl, in.problem, tensors.args());
    wrong[static_cast<size_t>(rank)] = tensors.difference(expected);
  });
  std::string text;
  for (int rank = 0; rank < group.ranks(); ++rank) {
    const std::string& difference = wrong[static_cast<size_t>(rank)];
    if (!difference.empty()) text += fmt::format("rank {}: {}\n", rank, difference);
    const AllReduceFault fault = group.fault(rank);
    if (fault.kind != AllReduceFault::kNone) {
      text += fmt::format("rank {}: fault {} at rank {}\n", rank, fault.kind, fault.peer);
    }
  }
  return text;
}

void expect_model_bytes(const RankGroup& group, const GoldenInputs& in,
                        const RankOptions& options = {}) {
  const GoldenOutputs expected = allreduce_golden(in);
  for (const AllReduceImpl* impl : kCpuImpls) {
    EXPECT_EQ(run_case(group, *impl, in, expected, options), "")
        << impl->name << ", " << group.ranks() << " ranks: " << to_string(in.problem);
  }
  EXPECT_TRUE(group.intact());
}

// One workspace for each number of ranks and each width of elements: calls of all sizes follow each
// other on it.
class Groups {
 public:
  static constexpr int64_t kCapacity = 300'000;

  const RankGroup& of(int ranks, DType element) {
    auto& group = groups_[static_cast<size_t>(ranks)][element == DType::kF32 ? 1 : 0];
    if (group == nullptr) {
      group =
          std::make_unique<RankGroup>(ranks, AllReduceCapacities{kCapacity, kCapacity}, element);
    }
    return *group;
  }

 private:
  std::array<std::array<std::unique_ptr<RankGroup>, 2>, kMaxRanks + 1> groups_;
};

bool has_layouts(AllReduceQuantization quantization) {
  return quantization == AllReduceQuantization::kNvfp4 ||
         quantization == AllReduceQuantization::kNvfp4PerToken ||
         quantization == AllReduceQuantization::kMxfp8 ||
         quantization == AllReduceQuantization::kMxfp4;
}

// Calls body(problem) for every combination of pattern, quantization, element and layout, with
// tokens and hidden left open.
template <typename Body>
void for_each_kind(const Body& body) {
  for (int pattern = 0; pattern < kNumAllReducePatterns; ++pattern) {
    AllReduceProblem problem{.pattern = static_cast<AllReducePattern>(pattern)};
    const bool is_fused_moe = is_moe(problem.pattern);
    for (int quantization = 0; quantization <= (is_fused_moe ? 8 : 0); ++quantization) {
      problem.moe_quantization = static_cast<AllReduceQuantization>(quantization);
      for (const DType element : {DType::kBF16, DType::kF16, DType::kF32}) {
        if (is_fused_moe && element == DType::kF32) continue;
        problem.element = element;
        for (const ScaleLayoutId layout :
             {ScaleLayoutId::kSwizzled128x4, ScaleLayoutId::kSwizzled8x4, ScaleLayoutId::kLinear}) {
          if (layout != ScaleLayoutId::kSwizzled128x4 && !has_layouts(quantization_of(problem))) {
            continue;
          }
          problem.scale_layout = layout;
          body(problem);
        }
      }
    }
  }
}

// Columns of a row that the quantization allows.
int64_t hidden_of(AllReduceProblem& problem, Random& random) {
  const AllReduceQuantization quantization = quantization_of(problem);
  if (quantization == AllReduceQuantization::kFp8GroupUe8m0) {
    problem.group = static_cast<int>(random.pick({16, 32, 64, 128, 256}));
    return problem.group * random.pick<int64_t>({1, 2, 4, 5, 11, 28});
  }
  if (quantization == AllReduceQuantization::kMxfp8 ||
      quantization == AllReduceQuantization::kMxfp4) {
    return random.pick<int64_t>({32, 96, 288, 1056, 2880, 7168});
  }
  if (has_layouts(quantization)) return random.pick<int64_t>({16, 48, 80, 1552, 2880, 7168});
  return random.pick<int64_t>({8, 16, 24, 32, 136, 1544, 2880, 7168});
}

int64_t tokens_of(const AllReduceProblem& problem, Random& random) {
  const int64_t bytes = problem.hidden * (bits(problem.element) / 8);
  const int64_t most = std::min<int64_t>(33, Groups::kCapacity / 3 / bytes);
  return std::min(most, random.pick<int64_t>({1, 2, 3, 4, 7, 9, 33}));
}

TEST(AllReduceCpu, GivesTheModelsBytesForEveryKindOfCall) {
  Groups groups;
  Random random(1);
  int kinds = 0;
  for_each_kind([&](AllReduceProblem problem) {
    ++kinds;
    const int ranks = random.pick({2, 3, 4, 8});
    for (const int group : {1, ranks}) {
      problem.group = 0;
      problem.hidden = hidden_of(problem, random);
      problem.tokens = tokens_of(problem, random);
      problem.accumulation =
          random.chance(50) ? AllReduceAccumulation::kFp32 : AllReduceAccumulation::kElement;
      const auto fill = static_cast<Fill>(random.range(0, kNumFills - 1));
      const RankOptions options{.leaves_out_optional = random.chance(30),
                                .misalignment = 4 * random.range(0, 3)};
      expect_model_bytes(groups.of(group, problem.element),
                         random_inputs(problem, group, fill, random.bits()), options);
    }
  });
  EXPECT_EQ(kinds, 30 + 8 * 3 * 3 + 2 * 2 * (5 + 4 * 3));
}

TEST(AllReduceCpu, GivesTheModelsBytesWithSeveralCtas) {
  Groups groups;
  Random random(2);
  for (const AllReducePattern pattern :
       {AllReducePattern::kAllReduce, AllReducePattern::kNormNvfp4, AllReducePattern::kNormFp8Group,
        AllReducePattern::kMoeFinalize}) {
    for (const int ctas : {2, 3, 5}) {
      set_cpu_ctas_per_rank(ctas);
      AllReduceProblem problem{
          .tokens = random.pick({1, 2, 7, 33}), .hidden = 256, .pattern = pattern};
      if (pattern == AllReducePattern::kNormFp8Group) problem.group = 64;
      const int ranks = random.pick({2, 3, 8});
      expect_model_bytes(groups.of(ranks, problem.element),
                         random_inputs(problem, ranks, Fill::kNormal, random.bits()));
    }
  }
  set_cpu_ctas_per_rank(1);
}

TEST(AllReduceCpu, WritesOverItsInputs) {
  Groups groups;
  const auto run = [&](AllReducePattern pattern, Alias alias) {
    const AllReduceProblem problem{.tokens = 5, .hidden = 64, .pattern = pattern};
    expect_model_bytes(groups.of(3, problem.element), random_inputs(problem, 3, Fill::kNormal, 7),
                       {.alias = alias});
  };
  run(AllReducePattern::kAllReduce, Alias::kInputIsArOut);
  run(AllReducePattern::kNormFp8, Alias::kResidual);
  run(AllReducePattern::kNormFp8, Alias::kInputIsResidualOut);
  run(AllReducePattern::kNormFp8, Alias::kInputIsNormOut);
}

// The sentinel of the one-shot buffers is -0.
TEST(AllReduceCpu, TakesNegativeZerosForZeros) {
  Groups groups;
  for (const DType element : {DType::kBF16, DType::kF16, DType::kF32}) {
    const AllReduceProblem problem{.tokens = 3, .hidden = 24, .element = element};
    GoldenInputs in = random_inputs(problem, 4, Fill::kZeros, 3);
    for (GoldenRank& rank : in.ranks) {
      for (int64_t i = 0; i < 3 * 24; ++i) {
        store_element(element, element_bits(element, -0.0F), i, rank.input.data());
      }
    }
    expect_model_bytes(groups.of(4, element), in);
    const GoldenOutputs out = allreduce_golden(in);
    EXPECT_EQ(out.ar_out, std::vector<uint8_t>(out.ar_out.size(), 0));
  }
}

TEST(AllReduceCpu, StoresEveryNanAsTheCanonicalOne) {
  Groups groups;
  for (const int ranks : {1, 2}) {
    const AllReduceProblem problem{.tokens = 2, .hidden = 16};
    GoldenInputs in = random_inputs(problem, ranks, Fill::kNormal, 4);
    for (const uint32_t payload : {0x7F81U, 0xFF81U, 0x7FC1U, 0xFFFFU}) {
      store_element(DType::kBF16, payload, payload % 32, in.ranks[0].input.data());
    }
    expect_model_bytes(groups.of(ranks, problem.element), in);
  }
}

// Norms that overflow, by way of gamma.
TEST(AllReduceCpu, QuantizesInfiniteNorms) {
  Groups groups;
  for (const AllReducePattern pattern :
       {AllReducePattern::kNormFp8Group, AllReducePattern::kNormFp8Token,
        AllReducePattern::kNormFp8Block, AllReducePattern::kNormNvfp4,
        AllReducePattern::kNormNvfp4PerToken, AllReducePattern::kNormMxfp8,
        AllReducePattern::kNormMxfp4}) {
    for (const DType element : {DType::kBF16, DType::kF16, DType::kF32}) {
      AllReduceProblem problem{.tokens = 3, .hidden = 256, .element = element, .pattern = pattern};
      if (pattern == AllReducePattern::kNormFp8Group) problem.group = 32;
      GoldenInputs in = random_inputs(problem, 2, Fill::kNormal, 5);
      for (const int64_t col : {3, 70, 71}) {
        store_element(element, element_bits(element, col == 3 ? kFloatInfinity : -kFloatInfinity),
                      col, in.gamma.data());
      }
      expect_model_bytes(groups.of(2, element), in);
    }
  }
}

// A row that does not exist counts as -1, and is reported.
TEST(AllReduceCpu, ReportsRowsThatDoNotExist) {
  for (const AllReduceImpl* impl : kCpuImpls) {
    for (const int32_t bad : {-2, INT32_MIN, INT32_MAX}) {
      const RankGroup group(2, {1 << 16, 1 << 16}, DType::kBF16);
      const AllReduceProblem problem{
          .tokens = 4, .hidden = 32, .pattern = AllReducePattern::kMoeFinalize};
      GoldenInputs in = random_inputs(problem, 2, Fill::kNormal, 5);
      in.ranks[1].slot_to_row[static_cast<size_t>(in.top_k * 2)] = bad;
      const GoldenOutputs expected = allreduce_golden(in);
      run_as_threads(2, [&](int rank) {
        const RankTensors tensors(in, rank);
        run_rank(group, rank, *impl, problem, tensors.args());
        EXPECT_EQ(tensors.difference(expected), "") << impl->name;
      });
      EXPECT_EQ(group.fault(0).kind, AllReduceFault::kNone);
      EXPECT_EQ(group.fault(1).kind, AllReduceFault::kBadIndex);
      EXPECT_EQ(group.fault(1).peer, 2U);
      EXPECT_EQ(static_cast<int32_t>(group.fault(1).detail), bad);
    }
  }
}

#if defined(__x86_64__)
TEST(AllReduceCpu, KeepsDenormalsWhereTheCallerFlushesThem) {
  Groups groups;
  const AllReduceProblem problem{
      .tokens = 4, .hidden = 64, .pattern = AllReducePattern::kNormFp8Token};
  const GoldenInputs in = random_inputs(problem, 2, Fill::kDenormals, 6);
  const GoldenOutputs expected = allreduce_golden(in);
  const RankGroup& group = groups.of(2, problem.element);
  for (const AllReduceImpl* impl : kCpuImpls) {
    run_as_threads(2, [&](int rank) {
      const RankTensors tensors(in, rank);
      const uint32_t saved = _mm_getcsr();
      constexpr uint32_t kFlushAndRoundDown = 0x8040 | 0x2000;
      _mm_setcsr(saved | kFlushAndRoundDown);
      run_rank(group, rank, *impl, problem, tensors.args());
      EXPECT_EQ(_mm_getcsr() & kFlushAndRoundDown, kFlushAndRoundDown);
      _mm_setcsr(saved);
      EXPECT_EQ(tensors.difference(expected), "") << impl->name;
    });
  }
}
#endif

// ---- The library's own quantizers

// The outputs of rank 0.
struct FusedCall {
  GoldenInputs in;
  std::unique_ptr<RankTensors> tensors;
};

FusedCall run_fused(const GoldenInputs& in) {
  const RankGroup group(2, {1 << 18, 1 << 18}, in.problem.element);
  FusedCall call{in, std::make_unique<RankTensors>(in, 0)};
  run_as_threads(2, [&](int rank) {
    const RankTensors other(in, 1);
    run_rank(group, rank, kAllReduceCpuOneShot, in.problem,
             rank == 0 ? call.tensors->args() : other.args());
  });
  return call;
}

std::vector<uint8_t> bytes_of(const TensorView& view) {
  const auto* const data = static_cast<const uint8_t*>(view.data);
  // F4 tensors count bytes here.
  const int64_t size = view.num_elements() * std::max(8, bits(view.dtype)) / 8;
  return {data, data + size};
}

TEST(AllReduceCpu, EqualsAnAllReduceFollowedByTheNormQuantizer) {
  struct Kind {
    AllReducePattern pattern;
    FormatId format;
    ScaleLayoutId layout;
  };
  constexpr std::array kKinds{
      Kind{AllReducePattern::kNvfp4, FormatId::kNvfp4, ScaleLayoutId::kSwizzled128x4},
      Kind{AllReducePattern::kNormNvfp4, FormatId::kNvfp4, ScaleLayoutId::kSwizzled8x4},
      Kind{AllReducePattern::kNvfp4PerToken, FormatId::kNvfp4PerToken, ScaleLayoutId::kLinear},
      Kind{AllReducePattern::kMxfp4, FormatId::kMxfp4, ScaleLayoutId::kSwizzled128x4},
      Kind{AllReducePattern::kMxfp8, FormatId::kMxfp8, ScaleLayoutId::kSwizzled8x4},
      Kind{AllReducePattern::kFp8Block, FormatId::kFp8Block1x128, ScaleLayoutId::kLinear},
      Kind{AllReducePattern::kFp8, FormatId::kFp8Tensor, ScaleLayoutId::kLinear}};
  for (const Kind& kind : kKinds) {
    for (const DType element : {DType::kBF16, DType::kF16}) {
      for (const Fill fill : {Fill::kNormal, Fill::kDenormals, Fill::kSpecials, Fill::kExtremes}) {
        AllReduceProblem problem{
            .tokens = 5, .hidden = 2880, .element = element, .pattern = kind.pattern};
        if (kind.format != FormatId::kFp8Block1x128 && kind.format != FormatId::kFp8Tensor) {
          problem.scale_layout = kind.layout;
        }
        GoldenInputs in = random_inputs(problem, 2, fill, 8);
        in.weight_bias = 0.0F;
        const FusedCall fused = run_fused(in);

        GoldenInputs plain = in;
        plain.problem.pattern = AllReducePattern::kAllReduce;
        plain.problem.scale_layout = AllReduceProblem{}.scale_layout;
        const FusedCall sum = run_fused(plain);
        QuantizeOptions options;
        if (kind.format == FormatId::kNvfp4) options.encode_scale = in.global_scale;
        if (kind.format == FormatId::kFp8Tensor) options.fp8_decode_scale = in.global_scale;
        const QuantizedTensor output(quantized_layout(kind.format, problem.tokens, problem.hidden,
                                                      {.scale_layout = kind.layout}));
        std::vector<uint8_t> residual = in.residual;
        add_rmsnorm_quantize(sum.tensors->args().ar_out,
                             TensorView::contiguous(residual.data(), element, {5, 2880}),
                             TensorView::contiguous(in.gamma.data(), element, {2880}), output.view,
                             {.eps = in.eps}, options);
        SCOPED_TRACE(to_string(problem));
        const AllReduceArgs& args = fused.tensors->args();
        EXPECT_EQ(bytes_of(args.residual_out), residual);
        EXPECT_EQ(bytes_of(args.quant_out), output.values.copy());
        if (kind.format != FormatId::kFp8Tensor) {
          EXPECT_EQ(bytes_of(args.scale_out), output.scales.copy());
        }
        if (kind.format == FormatId::kNvfp4PerToken) {
          EXPECT_EQ(bytes_of(args.row_scale_out), output.global_scale.copy());
        }
      }
    }
  }
}

TEST(AllReduceCpu, EqualsTheGroupQuantizerOfTheNorm) {
  for (const Fill fill : {Fill::kNormal, Fill::kDenormals, Fill::kSpecials, Fill::kExtremes}) {
    for (const int group : {0, 32, 256}) {
      AllReduceProblem problem{
          .tokens = 6,
          .hidden = 1280,
          .pattern = group == 0 ? AllReducePattern::kNormFp8Token : AllReducePattern::kNormFp8Group,
          .group = group};
      GoldenInputs in = random_inputs(problem, 2, fill, 9);
      const FusedCall fused = run_fused(in);
      const AllReduceArgs& args = fused.tensors->args();
      const int64_t groups = group == 0 ? 1 : 1280 / group;
      std::vector<uint8_t> codes(6 * 1280);
      std::vector<float> scales(static_cast<size_t>(groups * 6));
      GroupQuantizeOptions options{.group_size = 1280 / groups,
                                   .scale_order = GroupScaleOrder::kColumnMajor,
                                   .power_of_two_scales = group != 0};
      if (group == 0) options.eps = 0x1p-9F;
      quantize_group_8bit(args.norm_out,
                          TensorView::contiguous(codes.data(), DType::kF8E4M3, {6, 1280}),
                          TensorView::contiguous(scales.data(), DType::kF32, {groups, 6}), options);
      EXPECT_EQ(bytes_of(args.quant_out), codes);
      for (int64_t g = 0; g < groups; ++g) {
        for (int64_t token = 0; token < 6; ++token) {
          const float scale = scales[static_cast<size_t>(g * 6 + token)];
          if (group == 0) {
            EXPECT_EQ(static_cast<const float*>(args.scale_out.data)[token], scale);
          } else {
            const auto* const exponents = static_cast<const uint8_t*>(args.scale_out.data);
            EXPECT_EQ(exponents[4 * (g / 4 * 8 + token) + g % 4], float_bits(scale) >> 23);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace narrowfloat::testing
