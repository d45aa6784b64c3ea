// Order, alignment and header text of the files we write.
#include "checkpoint/safetensors_layout.h"

#include <limits>

#include <fmt/format.h>

#include "checkpoint/safetensors_header.h"
#include "test_files.h"

namespace narrowfloat {
namespace {

std::vector<std::string> names_of(const FileLayout& layout) {
  std::vector<std::string> names;
  for (const TensorInfo& tensor : layout.tensors) names.push_back(tensor.name);
  return names;
}

TEST(PlanLayout, OrdersByWidthThenAlignedSizesThenSizeThenName) {
  const FileLayout layout = plan_layout({{"u8_small", DType::kU8, {8}},
                                         {"bf16_odd_big", DType::kBF16, {1001}},
                                         {"f4", DType::kF4, {64}},
                                         {"bf16_b", DType::kBF16, {4}},
                                         {"bf16_a", DType::kBF16, {4}},
                                         {"bf16_big", DType::kBF16, {400}},
                                         {"f32_odd", DType::kF32, {3}},
                                         {"f32", DType::kF32, {2}},
                                         {"f64", DType::kF64, {1}},
                                         {"f6", DType::kF6E2M3, {4}}},
                                        {});
  EXPECT_EQ(names_of(layout),
            (std::vector<std::string>{"f64", "f32", "f32_odd", "bf16_big", "bf16_a", "bf16_b",
                                      "bf16_odd_big", "u8_small", "f6", "f4"}));
}

TEST(PlanLayout, AlignsEveryTensorToItsElementsAndTheBufferTo4096) {
  std::vector<TensorSpec> specs;
  for (int type = 0; type < kNumDTypes; ++type) {
    for (const int64_t extent : {1, 3, 4, 7, 1000}) {
      const auto dtype = static_cast<DType>(type);
      const int64_t count = bits(dtype) < 8 ? 4 * extent : extent;
      specs.push_back({std::string(name(dtype)) + std::to_string(extent), dtype, {count}});
    }
  }
  const FileLayout layout = plan_layout(specs, {{"k", "v"}});
  EXPECT_EQ(layout.header.size() % 4096, 0U);
  EXPECT_EQ(layout.tensors.front().offset, layout.header.size());
  uint64_t end = layout.header.size();
  for (const TensorInfo& tensor : layout.tensors) {
    EXPECT_EQ(tensor.offset, end) << tensor.name;
    const auto width = static_cast<uint64_t>(bits(tensor.dtype)) / 8;
    if (width > 0) {
      EXPECT_EQ(tensor.offset % width, 0U) << tensor.name;
    }
    end += tensor.size_bytes;
  }
  EXPECT_EQ(layout.file_size, end);
}

TEST(PlanLayout, DoesNotDependOnTheOrderOfItsInput) {
  const std::vector<TensorSpec> specs = {
      {"a", DType::kBF16, {4}}, {"b", DType::kBF16, {4}}, {"c", DType::kF32, {2, 2}}};
  const FileLayout forward = plan_layout(specs, {{"x", "1"}, {"y", "2"}});
  const FileLayout backward = plan_layout({specs[2], specs[1], specs[0]}, {{"y", "2"}, {"x", "1"}});
  EXPECT_EQ(forward.header, backward.header);
  EXPECT_EQ(names_of(forward), names_of(backward));
}

TEST(PlanLayout, WritesTheHeaderTextOfTheFormat) {
  const FileLayout layout =
      plan_layout({{"a\"\n", DType::kF8E4M3, {2, 3}}, {"s", DType::kF32, {}}}, {{"format", "pt"}});
  const std::string header =
      R"({"__metadata__":{"format":"pt"},"s":{"dtype":"F32","shape":[],"data_offsets":[0,4]},)"
      R"("a\"\u000a":{"dtype":"F8_E4M3","shape":[2,3],"data_offsets":[4,10]}})";
  EXPECT_EQ(layout.header.substr(0, 8), length_field(4088));
  EXPECT_EQ(layout.header.substr(8, header.size()), header);
  EXPECT_EQ(layout.header.find_first_not_of(' ', 8 + header.size()), std::string::npos);
}

TEST(PlanLayout, FillsAPageExactlyWhereTheHeaderFits) {
  // Grow a metadata value one byte at a time across a page boundary.
  bool saw_full_page = false;
  for (size_t size = 4000; size < 4100; ++size) {
    const FileLayout layout = plan_layout({}, {{"k", std::string(size, 'v')}});
    EXPECT_EQ(layout.header.size() % 4096, 0U);
    saw_full_page = saw_full_page || layout.header.back() == '}';
    const std::string_view header = std::string_view(layout.header).substr(8);
    EXPECT_NO_THROW(parse_header(header, {.file = "f", .buffer_begin = layout.header.size()}));
  }
  EXPECT_TRUE(saw_full_page);
}

struct BadSpec {
  std::string_view name;
  std::vector<TensorSpec> tensors;
  std::string_view part;
};

TEST(PlanLayout, RefusesWhatTheFormatOrTheReaderWould) {
  const auto spec = [](std::string name, DType dtype = DType::kU8,
                       std::vector<int64_t> shape = {1}) {
    return std::vector<TensorSpec>{{std::move(name), dtype, std::move(shape)}};
  };
  const int64_t huge = std::numeric_limits<int64_t>::max();
  const std::vector<BadSpec> cases = {
      {"empty name", spec(""), "empty name"},
      {"reserved name", spec("__metadata__"), "reserved"},
      {"long name", spec(std::string(65'537, 'n')), "the limit is 65536"},
      {"NUL", spec(std::string("a\0b", 3)), "without NUL"},
      {"not UTF-8", spec("a\xFF"), "must be UTF-8"},
      {"duplicate", {{"a", DType::kU8, {1}}, {"a", DType::kF32, {2}}}, "two tensors are named 'a'"},
      {"negative", spec("a", DType::kU8, {4, -1}), "negative extent -1"},
      {"overflow", spec("a", DType::kF32, {huge, 2}), "overflows"},
      {"rank 33", spec("a", DType::kU8, std::vector<int64_t>(33, 1)), "33 dimensions"},
      {"odd F4", spec("a", DType::kF4, {3}), "whole bytes"},
      {"sum overflows", std::vector<TensorSpec>(9, {"a", DType::kU8, {int64_t{1} << 59}}),
       "named 'a'"},
  };
  for (const BadSpec& c : cases) {
    SCOPED_TRACE(c.name);
    expect_error(ErrorKind::kInvalidArgument, c.part, [&] { plan_layout(c.tensors, {}); });
  }
}

TEST(PlanLayout, RefusesASumThatOverflows) {
  std::vector<TensorSpec> tensors;
  for (int i = 0; i < 20; ++i) {
    tensors.push_back({std::to_string(i), DType::kU8, {int64_t{1} << 59}});
  }
  expect_error(ErrorKind::kInvalidArgument, "the file overflows",
               [&] { plan_layout(tensors, {}); });
}

TEST(PlanLayout, RefusesMetadataThatIsNotText) {
  expect_error(ErrorKind::kInvalidArgument, "must be UTF-8", [] {
    plan_layout({}, {{"k", "\xFF"}});
  });
  expect_error(ErrorKind::kInvalidArgument, "must be UTF-8", [] {
    plan_layout({}, {{std::string(1, '\0'), "v"}});
  });
  expect_error(ErrorKind::kInvalidArgument, "too many", [] {
    plan_layout({}, {{"k", std::string(17'000'000, 'v')}});
  });
}

TEST(PlanLayout, RefusesAHeaderOverTheLimitOfTheFormat) {
  std::vector<TensorSpec> tensors;
  for (int i = 0; i < 1600; ++i) {
    std::string name(65'000, 'n');
    tensors.push_back({name + std::to_string(i), DType::kU8, {0}});
  }
  expect_error(ErrorKind::kInvalidArgument, "use more shards", [&] { plan_layout(tensors, {}); });
}

TEST(HeaderBounds, AreNeverBelowTheHeader) {
  const std::map<std::string, std::string> metadata = {{"a\n", "\"quoted\""}, {"b", ""}};
  std::vector<TensorSpec> tensors;
  uint64_t bound = max_metadata_entry_bytes(metadata) + kBufferAlignment;
  for (int i = 0; i < 500; ++i) {
    TensorSpec spec{fmt::format("n\x01{}", i), DType::kF8E4M3Fnuz, {}};
    // The longest spellings: extents of 19 digits, offsets of 18.
    if (i % 2 == 0) spec.shape = {int64_t{1} << 49, 1, 1, 1};
    if (i % 3 == 0) spec.shape = {0, (int64_t{1} << 60) - 1};
    bound += max_entry_bytes(spec);
    tensors.push_back(spec);
  }
  EXPECT_GE(bound, plan_layout(tensors, metadata).header.size());
}

}  // namespace
}  // namespace narrowfloat
