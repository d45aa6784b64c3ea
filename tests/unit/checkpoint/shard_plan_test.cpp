// Output shards: names, limits, groups that stay together, and the index text.
#include "checkpoint/shard_plan.h"

#include "checkpoint/index.h"
#include "checkpoint/safetensors_layout.h"
#include "test_files.h"

namespace narrowfloat {
namespace {

TensorGroup group_of(const std::string& name, int64_t size_bytes) {
  return {{name + ".codes", DType::kU8, {size_bytes - 1}}, {name + ".scale", DType::kU8, {1}}};
}

std::vector<PlannedShard> plan(const std::vector<TensorGroup>& groups, uint64_t max_shard_bytes) {
  return plan_shards(groups, {.max_shard_bytes = max_shard_bytes, .metadata = {}});
}

TEST(PlanShards, NamesOneShardWithoutNumbers) {
  const auto shards = plan({group_of("a", 10), group_of("b", 10)}, 20);
  ASSERT_EQ(shards.size(), 1U);
  EXPECT_EQ(shards[0].file_name, "model.safetensors");
  EXPECT_EQ(shards[0].tensor_bytes, 20U);
  EXPECT_EQ(shards[0].tensors.size(), 4U);
}

TEST(PlanShards, StartsANewShardBeforeTheLimitAndNumbersThem) {
  const auto shards = plan({group_of("a", 10), group_of("b", 10), group_of("c", 5)}, 19);
  ASSERT_EQ(shards.size(), 2U);
  EXPECT_EQ(shards[0].file_name, "model-00001-of-00002.safetensors");
  EXPECT_EQ(shards[1].file_name, "model-00002-of-00002.safetensors");
  EXPECT_EQ(shards[0].tensor_bytes, 10U);
  EXPECT_EQ(shards[1].tensor_bytes, 15U);
}

TEST(PlanShards, KeepsGroupsTogetherEvenOverTheLimit) {
  const auto shards = plan({group_of("a", 2), group_of("big", 100), group_of("c", 2)}, 10);
  ASSERT_EQ(shards.size(), 3U);
  EXPECT_EQ(shards[1].tensor_bytes, 100U);
  EXPECT_EQ(shards[1].tensors[0].name, "big.codes");
  EXPECT_EQ(shards[1].tensors[1].name, "big.scale");
}

TEST(PlanShards, MakesOneEmptyShardOfNothing) {
  const auto shards = plan({}, 10);
  ASSERT_EQ(shards.size(), 1U);
  EXPECT_TRUE(shards[0].tensors.empty());
}

TEST(PlanShards, SplitsBeforeAHeaderIsOverTheFormatsLimit) {
  std::vector<TensorGroup> groups;
  for (int i = 0; i < 3000; ++i) {
    groups.push_back({{std::string(65'000, 'n') + std::to_string(i), DType::kU8, {0}}});
  }
  const auto shards = plan(groups, 1'000'000);
  EXPECT_EQ(shards.size(), 2U);
  EXPECT_NO_THROW(plan_layout(shards[0].tensors, {}));
}

TEST(PlanShards, RefusesWhatCannotBeWritten) {
  expect_error(ErrorKind::kInvalidArgument, "must be above 0", [] { plan({}, 0); });
  expect_error(ErrorKind::kInvalidArgument, "negative extent", [] {
    plan({{{"a", DType::kU8, {-1}}}}, 10);
  });
  TensorGroup huge;
  for (int i = 0; i < 1600; ++i) {
    huge.push_back({std::string(65'000, 'n') + std::to_string(i), DType::kU8, {0}});
  }
  expect_error(ErrorKind::kInvalidArgument, "and what belongs to it need a header of",
               [&] { plan({huge}, 10); });
}

TEST(IndexJson, IsSortedExactAndReadByOurParser) {
  const auto shards = plan({group_of("b\"", 10), group_of("a", 10)}, 10);
  const std::string text = index_json(shards);
  EXPECT_EQ(text,
            "{\n"
            "  \"metadata\": {\n"
            "    \"total_size\": 20\n"
            "  },\n"
            "  \"weight_map\": {\n"
            "    \"a.codes\": \"model-00002-of-00002.safetensors\",\n"
            "    \"a.scale\": \"model-00002-of-00002.safetensors\",\n"
            "    \"b\\\".codes\": \"model-00001-of-00002.safetensors\",\n"
            "    \"b\\\".scale\": \"model-00001-of-00002.safetensors\"\n"
            "  }\n"
            "}\n");
  const ShardIndex index = parse_index(text, "index");
  EXPECT_EQ(index.total_size, 20);
  EXPECT_EQ(index.entries.size(), 4U);
  EXPECT_EQ(index.files.size(), 2U);
}

}  // namespace
}  // namespace narrowfloat
