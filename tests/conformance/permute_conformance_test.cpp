// Every implementation of permute against cpu_reference: the same maps, whole buffers.
#include <algorithm>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "conformance/case_sampling.h"
#include "narrowfloat/error.h"
#include "ops/permute/permute_problem.h"
#include "support/environment.h"
#include "support/permuted.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kCasesPerSpread = 120;

IdShape sample_shape(Random& random) {
  IdShape shape;
  shape.slots = random.pick<int64_t>({1, 1, 2, 3, 4, 6, 8, 9, 22});
  shape.tokens = std::min<int64_t>(sample_rows(random), 3000);
  if (random.chance(8)) shape.tokens = random.range(4000, 12000);
  shape.experts = random.pick<int32_t>({1, 2, 3, 8, 32, 72, 90, 96, 128, 256, 257, 512, 4096});
  shape.local = shape.experts;
  if (random.chance(50)) shape.local = static_cast<int32_t>(random.range(1, shape.experts));
  shape.offset = static_cast<int32_t>(random.range(0, shape.experts - shape.local));
  shape.tile = 1 << random.range(0, 8);
  return shape;
}

class PermuteConformance : public ::testing::TestWithParam<int> {};

TEST_P(PermuteConformance, EveryImplementationGivesTheReferencesMaps) {
  const auto spread = static_cast<IdSpread>(GetParam());
  for_cases(kCasesPerSpread, [&](int64_t index) {
    Random random(case_seed("permute" + std::string(name(spread)), index));
    const IdShape shape = sample_shape(random);
    const std::vector<int32_t> ids = expert_ids(spread, shape, random);
    Permuted expected(shape);
    {
      const ForcedImplementation forced("permute", "cpu_reference");
      expected = Permuted(shape, ids);
    }
    for (const PermuteImpl& impl : permute_impls()) {
      const std::string note =
          fmt::format("{}\n  {} {}x{} slots, {} experts, local {} from {}, tile {}",
                      repro_line("permute", impl.name, index), name(spread), shape.tokens,
                      shape.slots, shape.experts, shape.local, shape.offset, shape.tile);
      set_crash_note(note.c_str());
      for (const uint8_t poison : {uint8_t{0x00}, uint8_t{0xFF}}) {
        const ForcedImplementation forced("permute", impl.name);
        try {
          const Permuted actual(shape, ids, poison);
          EXPECT_TRUE(actual.buffer.intact()) << note;
          EXPECT_TRUE(actual.buffer.copy() == expected.buffer.copy()) << note;
        } catch (const Error& error) {
          ASSERT_EQ(error.kind(), ErrorKind::kUnsupported) << error.what() << "\n" << note;
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(All, PermuteConformance, ::testing::Range(0, kNumIdSpreads),
                         [](const auto& test) {
                           return std::string(name(static_cast<IdSpread>(test.param)));
                         });

TEST(PermuteImplementations, EndWithTheOracle) {
  ASSERT_FALSE(permute_impls().empty());
  EXPECT_EQ(permute_impls().back().name, "cpu_reference");
}

}  // namespace
}  // namespace narrowfloat::testing
