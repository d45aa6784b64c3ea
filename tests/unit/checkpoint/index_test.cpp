// The text of an index: what it may name, and what it is read as.
#include "checkpoint/index.h"

#include <vector>

#include <fmt/format.h>

#include "test_files.h"

namespace narrowfloat {
namespace {

std::string map_to(std::string_view file) {
  return std::string(R"({"weight_map":{"t":")").append(file).append("\"}}");
}

// An index of numbered tensors in numbered files.
std::string map_of(int num_tensors, int num_files) {
  std::vector<std::string> members;
  for (int i = 0; i < num_tensors; ++i) {
    members.push_back(fmt::format("\"{}\":\"{}\"", i, i % num_files));
  }
  return object({std::string("\"weight_map\":").append(object(members))});
}

TEST(ParseIndex, SortsFilesAndTensors) {
  const ShardIndex index = parse_index(
      R"({"metadata":{"total_size":12,"extra":[1,{"x":null}]},"other":{"weight_map":{"n":1}},)"
      R"("weight_map":{"b":"2.safetensors","a":"1.safetensors","c":"2.safetensors"}})",
      "index");
  EXPECT_EQ(index.files, (std::vector<std::string>{"1.safetensors", "2.safetensors"}));
  ASSERT_EQ(index.entries.size(), 3U);
  EXPECT_EQ(index.entries[0].tensor, "a");
  EXPECT_EQ(index.entries[0].file, 0U);
  EXPECT_EQ(index.entries[1].tensor, "b");
  EXPECT_EQ(index.entries[1].file, 1U);
  EXPECT_EQ(index.entries[2].file, 1U);
  EXPECT_EQ(index.total_size, 12);
  EXPECT_TRUE(index.warnings.empty());
}

TEST(ParseIndex, AcceptsPlainFileNamesOnly) {
  for (const char* name : {"a.safetensors", "..a", "a..b", "größe", "a b", "C:", "-", "~"}) {
    EXPECT_NO_THROW(parse_index(map_to(name), "index")) << name;
  }
  for (const char* name :
       {"", ".", "..", "../x", "/etc/passwd", "a/../../b", "a/b", "a/", "./a", "C:\\\\", "a\\\\b",
        "a\\u0000", "\\u0000", "\\u002fetc", "\\u002e\\u002e", "/dev/zero", "~/x"}) {
    SCOPED_TRACE(name);
    expect_error(ErrorKind::kCorruptData, "expected one plain file name",
                 [&] { parse_index(map_to(name), "index"); });
  }
}

struct RefusedIndexText {
  std::string_view name;
  std::string text;
  std::string_view part;
};

TEST(ParseIndex, RefusesWhatIsNoMapOfStrings) {
  const std::vector<RefusedIndexText> cases = {
      {"empty file", "", "invalid JSON"},
      {"array", "[]", "must be an object"},
      {"no weight_map", R"({"metadata":{"weight_map":{}}})", "has no 'weight_map'"},
      {"weight_map is empty", R"({"weight_map":{}})", "'weight_map' is empty"},
      {"weight_map is an array", R"({"weight_map":[]})", "must be an object, got an array"},
      {"weight_map is a string", R"({"weight_map":"x"})", "must be an object, got a string"},
      {"weight_map is null", R"({"weight_map":null})", "must be an object, got null"},
      {"weight_map is a number", R"({"weight_map":3})", "must be an object, got 3"},
      {"file is a number", R"({"weight_map":{"t":3}})", "must be a string, got 3"},
      {"file is null", R"({"weight_map":{"t":null}})", "must be a string, got null"},
      {"file is an array", R"({"weight_map":{"t":["a"]}})", "must be a string, got an array"},
      {"file is an object", R"({"weight_map":{"t":{"a":"b"}}})", "must be a string"},
      {"duplicate tensor", R"({"weight_map":{"t":"a","t":"b"}})", "duplicate key 't'"},
      {"duplicate weight_map", R"({"weight_map":{},"weight_map":{}})", "duplicate key"},
      {"duplicate total_size", R"({"metadata":{"total_size":1,"total_size":2},"weight_map":{}})",
       "duplicate key"},
      {"names differ in case", R"({"weight_map":{"t":"A.safetensors","u":"a.safetensors"}})",
       "differ in case only"},
      {"NUL in a tensor name", R"({"weight_map":{"t\u0000":"a"}})", "holds a NUL"},
      {"terminal escape", R"({"weight_map":{"\u001b[2J":"/"}})", "tensor '\\x1b[2J'"},
      {"deep", R"({"x":)" + std::string(100'000, '[') + "}", "deeper than 64"},
  };
  for (const RefusedIndexText& c : cases) {
    SCOPED_TRACE(c.name);
    expect_error(ErrorKind::kCorruptData, c.part, [&] { parse_index(c.text, "index"); });
  }
}

TEST(ParseIndex, WarnsOfATotalSizeThatIsNoPlainNumber) {
  for (const char* value : {"-5", "1.5e9", "\"12\"", "null", "9223372036854775808"}) {
    const std::string text = std::string(R"({"metadata":{"total_size":)")
                                 .append(value)
                                 .append(R"(},"weight_map":{"t":"f"}})");
    const ShardIndex index = parse_index(text, "index");
    EXPECT_FALSE(index.total_size.has_value());
    ASSERT_EQ(index.warnings.size(), 1U) << value;
    EXPECT_NE(index.warnings[0].find("not a plain number"), std::string::npos);
  }
}

TEST(ParseIndex, TakesLinearTimeForManyTensors) {
  const ShardIndex index = parse_index(map_of(200'000, 100), "index");
  EXPECT_EQ(index.entries.size(), 200'000U);
  EXPECT_EQ(index.files.size(), 100U);
}

TEST(ParseIndex, BoundsTheNumberOfFiles) {
  expect_error(ErrorKind::kCorruptData, "more than 100000 files",
               [] { parse_index(map_of(100'001, 100'001), "index"); });
}

}  // namespace
}  // namespace narrowfloat
