// Rewriting one member of a JSON text without touching another byte.
#include "checkpoint/config_text.h"

#include <gtest/gtest.h>

#include "test_files.h"

namespace narrowfloat {
namespace {

constexpr std::string_view kText =
    "{\n  \"b\": 1.50e-06,\n  \"a\": {\"x\": [1, \"}\"]},\n  \"last\":\t\"v\\\"\"\n}\n";

TEST(SetTopLevelMember, ReplacesOnlyTheValue) {
  EXPECT_EQ(set_top_level_member(kText, "a", "null"),
            "{\n  \"b\": 1.50e-06,\n  \"a\": null,\n  \"last\":\t\"v\\\"\"\n}\n");
  EXPECT_EQ(set_top_level_member(kText, "b", "[2]"),
            "{\n  \"b\": [2],\n  \"a\": {\"x\": [1, \"}\"]},\n  \"last\":\t\"v\\\"\"\n}\n");
  EXPECT_EQ(set_top_level_member(kText, "last", "true"),
            "{\n  \"b\": 1.50e-06,\n  \"a\": {\"x\": [1, \"}\"]},\n  \"last\":\ttrue\n}\n");
}

TEST(SetTopLevelMember, AddsANewMemberLastAndSpacesItLikeTheOneBefore) {
  EXPECT_EQ(set_top_level_member(kText, "new", "{\"k\": 1}"),
            "{\n  \"b\": 1.50e-06,\n  \"a\": {\"x\": [1, \"}\"]},\n  \"last\":\t\"v\\\"\",\n  "
            "\"new\":\t{\"k\": 1}\n}\n");
  EXPECT_EQ(set_top_level_member("{\"a\":1}", "b", "2"), "{\"a\":1,\"b\":2}");
  EXPECT_EQ(set_top_level_member("{\"a\": 1, \"b\": 2}", "c", "3"),
            "{\"a\": 1, \"b\": 2, \"c\": 3}");
  EXPECT_EQ(set_top_level_member("{}", "a", "1"), "{\"a\": 1}");
  EXPECT_EQ(set_top_level_member(" {\n}\n", "a", "1"), " {\"a\": 1\n}\n");
}

TEST(SetTopLevelMember, IgnoresTheSameKeyFurtherIn) {
  EXPECT_EQ(set_top_level_member(R"({"o":{"k":1},"s":"\"k\":7","k":2})", "k", "3"),
            R"({"o":{"k":1},"s":"\"k\":7","k":3})");
}

TEST(SetTopLevelMember, FindsAKeySpelledWithEscapes) {
  EXPECT_EQ(set_top_level_member(R"({"\u006b":1})", "k", "2"), R"({"\u006b":2})");
  EXPECT_EQ(set_top_level_member("{}", "a\"b\n", "2"), "{\"a\\\"b\\u000a\": 2}");
}

TEST(SetTopLevelMember, RefusesATextOrValueThatIsNotJson) {
  expect_error(ErrorKind::kCorruptData, "invalid JSON",
               [] { set_top_level_member("{\"a\":1", "a", "2"); });
  expect_error(ErrorKind::kCorruptData, "must be an object",
               [] { set_top_level_member("[1]", "a", "2"); });
  expect_error(ErrorKind::kCorruptData, "duplicate key 'a'",
               [] { set_top_level_member("{\"a\":1,\"a\":2}", "a", "2"); });
  expect_error(ErrorKind::kInvalidArgument, "is not JSON",
               [] { set_top_level_member("{}", "a", "2,"); });
}

TEST(RemoveTopLevelMember, TakesTheMemberAndOneComma) {
  EXPECT_EQ(remove_top_level_member(kText, "a"),
            "{\n  \"b\": 1.50e-06,\n  \"last\":\t\"v\\\"\"\n}\n");
  EXPECT_EQ(remove_top_level_member(kText, "b"),
            "{\n  \"a\": {\"x\": [1, \"}\"]},\n  \"last\":\t\"v\\\"\"\n}\n");
  EXPECT_EQ(remove_top_level_member(kText, "last"),
            "{\n  \"b\": 1.50e-06,\n  \"a\": {\"x\": [1, \"}\"]}\n}\n");
  EXPECT_EQ(remove_top_level_member("{\"a\":1}", "a"), "{}");
  EXPECT_EQ(remove_top_level_member("{ \"a\" : 1 , \"b\":2}", "a"), "{ \"b\":2}");
}

TEST(RemoveTopLevelMember, ChangesNothingForAnAbsentKey) {
  EXPECT_EQ(remove_top_level_member(kText, "x"), kText);
  EXPECT_EQ(remove_top_level_member("{}", "x"), "{}");
}

TEST(ConfigText, AddedAndRemovedAgainGivesTheSameBytes) {
  for (const std::string_view text : {kText, std::string_view("{}"), std::string_view("{ \"a\":1}"),
                                      std::string_view("{\r\n\t\"a\": [],\r\n\t\"b\": 1\r\n}")}) {
    EXPECT_EQ(
        remove_top_level_member(set_top_level_member(text, "new key", "{\"x\":[]}"), "new key"),
        text);
  }
}

}  // namespace
}  // namespace narrowfloat
