// Every implementation of permute against cpu_reference: the same maps, whole buffers.
#include <algorithm>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "conformance/case_sampling.h"
#include "conformance/coverage.h"
#include "narrowfloat/error.h"
#include "ops/permute/permute_problem.h"
#include "support/device_copies.h"
#include "support/environment.h"
#include "support/permuted.h"
#include "support/tensors.h"

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

// The buffer of the maps after a run, poisoned before it.
std::vector<uint8_t> run(const IdShape& shape, const Vector& ids, uint8_t poison, bool on_host) {
  const Permuted permuted(shape, poison);
  const DeviceCopies device({&ids.buffer(), &permuted.buffer},
                            {.on_host = on_host, .programmatic_launch = poison == 0xFF});
  const auto ids_view =
      TensorView::contiguous(ids.buffer().data(), DType::kI32, {shape.tokens, shape.slots});
  Permutation maps = permuted.maps;
  for (TensorView* map : {&maps.slot_to_row, &maps.row_to_token, &maps.row_to_slot, &maps.num_rows,
                          &maps.tile_to_expert, &maps.tile_row_end, &maps.num_tiles}) {
    *map = device.view(*map);
  }
  permute(device.view(ids_view), shape.offset, shape.local, maps, device.stream());
  EXPECT_TRUE(device.take_back());
  EXPECT_TRUE(permuted.buffer.intact());
  return permuted.buffer.copy();
}

class PermuteConformance : public DeviceTest<int> {};

TEST_P(PermuteConformance, EveryImplementationGivesTheReferencesMaps) {
  const auto spread = static_cast<IdSpread>(GetParam());
  Coverage coverage;
  for_cases(kCasesPerSpread, [&](int64_t index) {
    Random random(case_seed("permute" + std::string(name(spread)), index));
    const IdShape shape = sample_shape(random);
    const Vector ids = Vector::of(DType::kI32, expert_ids(spread, shape, random));
    std::vector<uint8_t> expected;
    {
      const ForcedImplementation forced("permute", "cpu_reference");
      expected = run(shape, ids, 0xFF, true);
    }
    for (const PermuteImpl& impl : permute_impls()) {
      if (!is_for_device(impl.name)) continue;
      const std::string note =
          fmt::format("{}\n  {} {}x{} slots, {} experts, local {} from {}, tile {}",
                      repro_line("permute", impl.name, index), name(spread), shape.tokens,
                      shape.slots, shape.experts, shape.local, shape.offset, shape.tile);
      set_crash_note(note.c_str());
      for (const uint8_t poison : {uint8_t{0x00}, uint8_t{0xFF}}) {
        const ForcedImplementation forced("permute", impl.name);
        try {
          EXPECT_TRUE(run(shape, ids, poison, false) == expected) << note;
          coverage.ran(impl.name);
        } catch (const Error& error) {
          ASSERT_EQ(error.kind(), ErrorKind::kUnsupported) << error.what() << "\n" << note;
          coverage.refused(impl.name, error.what());
        }
      }
    }
    coverage.end_case(true, name(spread));
  });
  coverage.report(name(spread));
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
