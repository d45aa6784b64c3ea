// Globs over tensor names.
#include <string>

#include <gtest/gtest.h>

#include "narrowfloat/checkpoint.h"

namespace narrowfloat {
namespace {

TEST(Glob, MatchesTheWholeText) {
  EXPECT_TRUE(glob_matches("a.b", "a.b"));
  EXPECT_FALSE(glob_matches("a.b", "a.bc"));
  EXPECT_FALSE(glob_matches("a.b", "xa.b"));
  EXPECT_TRUE(glob_matches("", ""));
  EXPECT_FALSE(glob_matches("", "a"));
  EXPECT_FALSE(glob_matches("a", ""));
}

TEST(Glob, StarTakesAnyRun) {
  EXPECT_TRUE(glob_matches("*", ""));
  EXPECT_TRUE(glob_matches("*down_proj.weight", "model.layers.0.mlp.down_proj.weight"));
  EXPECT_TRUE(glob_matches("model.*.mlp.*", "model.layers.3.mlp.up_proj.weight"));
  EXPECT_TRUE(glob_matches("a*b*c**", "aXbYbZc"));
  EXPECT_FALSE(glob_matches("a*b*c", "aXbYbZ"));
}

TEST(Glob, QuestionMarkTakesOneCharacter) {
  EXPECT_TRUE(glob_matches("layers.?.x", "layers.7.x"));
  EXPECT_FALSE(glob_matches("layers.?.x", "layers.17.x"));
  EXPECT_FALSE(glob_matches("?", ""));
}

TEST(Glob, SetsTakeOneOfTheirMembers) {
  EXPECT_TRUE(glob_matches("[kv]_proj", "k_proj"));
  EXPECT_FALSE(glob_matches("[kv]_proj", "q_proj"));
  EXPECT_TRUE(glob_matches("layers.[0-3].*", "layers.2.w"));
  EXPECT_FALSE(glob_matches("layers.[0-3].*", "layers.4.w"));
  EXPECT_TRUE(glob_matches("[!0-3]", "4"));
  EXPECT_FALSE(glob_matches("[!0-3]", "2"));
  EXPECT_TRUE(glob_matches("[]]", "]"));
  EXPECT_TRUE(glob_matches("[a-]", "-"));
  EXPECT_TRUE(glob_matches("*[0-9]x", "ab1y2x"));
}

TEST(Glob, UnclosedSetStandsForItself) {
  EXPECT_TRUE(glob_matches("a[b", "a[b"));
  EXPECT_FALSE(glob_matches("a[b", "ab"));
}

TEST(Glob, ManyStarsStayFast) {
  std::string pattern;
  for (int i = 0; i < 200; ++i) pattern += "*a";
  EXPECT_FALSE(glob_matches(pattern + "b", std::string(20'000, 'a')));
}

}  // namespace
}  // namespace narrowfloat
