// YAML beside the JSON that says the same.
#include "checkpoint/simple_yaml.h"

#include <nlohmann/json.hpp>

#include "unit/checkpoint/test_files.h"

namespace narrowfloat {
namespace {

TEST(SimpleYaml, SaysWhatItsJsonDoes) {
  struct Pair {
    const char* yaml;
    const char* json;
  };
  for (const auto& [yaml, json] : {
           Pair{"a : b", R"({"a": "b"})"},
           Pair{"---\n# c\n\na:   b c  # d\n'e f': \"g#\"\n", R"({"a": "b c", "e f": "g#"})"},
           Pair{"a:\n  - b\n  -   c:d\n", R"({"a": ["b", "c:d"]})"},
           Pair{"a:\r\n- b\r\n- c\r\nd: e", R"({"a": ["b", "c"], "d": "e"})"},
           Pair{"a:\n  - b: c\n    d: e\n  - f:\n      - g\n",
                R"({"a": [{"b": "c", "d": "e"}, {"f": ["g"]}]})"},
           Pair{"a:\n  -\n    b: c\n", R"({"a": [{"b": "c"}]})"},
           Pair{"- - a\n  - b\n- c", R"([["a", "b"], "c"])"},
           Pair{"a: []\nb: [c, 'd''e', \"f\\\"\\\\\", '*.g' ]  # h", R"({"a": [],
                "b": ["c", "d'e", "f\"\\", "*.g"]})"},
           Pair{"- {a: b c, 'd': [e, {f: g}]}\n- {}",
                R"([{"a": "b c", "d": ["e", {"f": "g"}]}, {}])"},
           Pair{"# c\n{a: [b], 'c': {d: '*.e'}}  # f\n", R"({"a": ["b"], "c": {"d": "*.e"}})"},
           Pair{"a:\n  {b: c}\nd:\n  - e\n", R"({"a": {"b": "c"}, "d": ["e"]})"},
           Pair{"a: no\nb: 1.0\nc: ~\nd: x#y\ne: -f", R"({"a": "no", "b": "1.0", "c": "~",
                "d": "x#y", "e": "-f"})"},
       }) {
    const std::string got = json_of_simple_yaml(yaml, "r.yaml");
    EXPECT_EQ(nlohmann::json::parse(got), nlohmann::json::parse(json)) << yaml << '\n' << got;
  }
}

TEST(SimpleYaml, NamesTheLineOfWhatIsWrong) {
  struct Case {
    const char* yaml;
    const char* part;
  };
  for (const auto& [yaml, part] : {
           Case{"", "r.yaml: has nothing but comments"},
           Case{"# a\n", "nothing but comments"},
           Case{"a:\n", "line 1: 'a:' has no value"},
           Case{"a:\nb: c", "line 1: 'a:' has no value"},
           Case{"a:\n  -\n", "line 2: '-' has no value"},
           Case{"a: b\n  c: d", "line 2: 'c: d' is indented"},
           Case{"a:\n    b: c\n  d: e", "line 3"},
           Case{"a: b\n- c", "line 2: '- c' is indented"},
           Case{"a:\n\tb: c", "indented by a tab"},
           Case{"a", "is no 'KEY: VALUE'"},
           Case{": a", "is no 'KEY: VALUE'"},
           Case{"'a' b", "is no 'KEY: VALUE'"},
           Case{"'a':b", "is no 'KEY: VALUE'"},
           Case{"a: {b, c: d}", "is no 'KEY: VALUE'"},
           Case{"a: b: c", "put it in quotes"},
           Case{"a: - b", "begin it on the next"},
           Case{"a: 'b", "no closing quote"},
           Case{"a: 'b' c", "has more after its value"},
           Case{"a: [b", "has no ',' or end"},
           Case{"a: [b,", "has no end of its brackets"},
           Case{"a: [b # c, d]", "has a comment before the end of its brackets"},
           Case{"a: {b: c # d}", "has a comment before the end of its brackets"},
           Case{"a: [b] c", "has more after its value"},
           Case{"a: {b}", "is no 'KEY: VALUE'"},
           Case{"a: {b: }", "is not read"},
           Case{"a: {b:", "has no value after a key"},
           Case{"{a: b,\n c: d}", "line 1: '{a: b,' has no end of its brackets on its line"},
           Case{"{a: b} c", "has more after its value"},
           Case{"{a: b}\nc: d", "line 2: 'c: d' is indented"},
       }) {
    try {
      FAIL() << yaml << json_of_simple_yaml(yaml, "r.yaml");
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << yaml << error.what();
    }
  }
}

TEST(SimpleYaml, RefusesTheRestOfTheLanguage) {
  for (const char* yaml :
       {"a: *b", "a: &b c", "a: !!int 1", "a: |\n  b", "a: >-\n  b", "a: b\n---\nc: d",
        "a: \"\\n\"", "%YAML 1.2", "? a\n: b", "a: @b", "a: [*b]", "*a: b"}) {
    expect_error(ErrorKind::kUnsupported, "r.yaml: line ",
                 [&] { json_of_simple_yaml(yaml, "r.yaml"); });
  }
  const std::string deep(100, '[');
  expect_error(ErrorKind::kCorruptData, "nested too deeply",
               [&] { json_of_simple_yaml("a: " + deep, "r.yaml"); });
  std::string lists;
  for (int i = 0; i < 100; ++i) lists += "- ";
  expect_error(ErrorKind::kCorruptData, "nested too deeply",
               [&] { json_of_simple_yaml(lists + "a", "r.yaml"); });
}

}  // namespace
}  // namespace narrowfloat
