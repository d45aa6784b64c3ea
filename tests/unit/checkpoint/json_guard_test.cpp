// The text that the strict JSON layer accepts and refuses, and the numbers that it reports.
#include "checkpoint/json_guard.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "test_files.h"

namespace narrowfloat {
namespace {

// Writes down the events.
class Recorder : public JsonVisitor {
 public:
  void begin_object() override { events.emplace_back("{"); }
  void end_object() override { events.emplace_back("}"); }
  void begin_array() override { events.emplace_back("["); }
  void end_array() override { events.emplace_back("]"); }
  void key(std::string&& text) override { events.push_back("key " + text); }
  void string(std::string&& text) override { events.push_back("string " + text); }
  void integer(int64_t value) override { events.push_back("integer " + std::to_string(value)); }
  void other_value(std::string_view spelling) override {
    events.push_back(std::string("other ").append(spelling));
  }

  std::vector<std::string> events;
};

std::vector<std::string> events_of(std::string_view text) {
  Recorder recorder;
  scan_json_object(text, "file", JsonLimits{}, recorder);
  return recorder.events;
}

TEST(JsonGuard, ReportsEveryEventInOrder) {
  EXPECT_EQ(events_of(R"( {"a": [1, "x"], "b": {"c": true}} )"),
            (std::vector<std::string>{"{", "key a", "[", "integer 1", "string x", "]", "key b", "{",
                                      "key c", "other true", "}", "}"}));
}

TEST(JsonGuard, CallsOnlyPlainDecimalDigitsBelow2To63AnInteger) {
  struct Case {
    std::string_view spelling;
    std::string_view event;
  };
  for (const Case& c :
       std::initializer_list<Case>{{"0", "integer 0"},
                                   {"9223372036854775807", "integer 9223372036854775807"},
                                   {"9223372036854775808", "other 9223372036854775808"},
                                   {"18446744073709551615", "other 18446744073709551615"},
                                   {"18446744073709551616", "other 18446744073709551616"},
                                   {"-0", "other -0"},
                                   {"-1", "other -1"},
                                   {"1.0", "other 1.0"},
                                   {"1e3", "other 1e3"},
                                   {"-9223372036854775808", "other -9223372036854775808"},
                                   {"null", "other null"},
                                   {"false", "other false"}}) {
    EXPECT_EQ(events_of(std::string("{\"n\":").append(c.spelling).append("}"))[2], c.event);
  }
}

struct RefusedText {
  std::string_view name;
  std::string text;
  std::string_view part;
};

TEST(JsonGuard, RefusesWhatIsNotStrictJson) {
  const std::string nul(1, '\0');
  const std::vector<RefusedText> cases = {
      {"empty", "", "invalid JSON"},
      {"blank", "  ", "invalid JSON"},
      {"array", "[]", "must be an object"},
      {"scalar", "1", "must be an object"},
      {"string", "\"x\"", "must be an object"},
      {"literal", "null", "must be an object"},
      {"unclosed", "{\"a\":1", "invalid JSON"},
      {"trailing text", "{} x", "invalid JSON"},
      {"two objects", "{}{}", "invalid JSON"},
      {"byte order mark", "\xEF\xBB\xBF{}", "byte order mark"},
      {"block comment", "{/* no */}", "invalid JSON"},
      {"line comment", "{} // no", "invalid JSON"},
      {"trailing comma in object", "{\"a\":1,}", "invalid JSON"},
      {"trailing comma in array", "{\"a\":[1,]}", "invalid JSON"},
      {"single quotes", "{'a':1}", "invalid JSON"},
      {"unquoted key", "{a:1}", "invalid JSON"},
      {"leading zero", "{\"a\":01}", "invalid JSON"},
      {"plus sign", "{\"a\":+1}", "invalid JSON"},
      {"hexadecimal", "{\"a\":0x10}", "invalid JSON"},
      {"not a number", "{\"a\":NaN}", "invalid JSON"},
      {"infinity", "{\"a\":Infinity}", "invalid JSON"},
      {"overflowing float", "{\"a\":1e400}", "number overflow"},
      {"point without digits", "{\"a\":1.}", "invalid JSON"},
      {"invalid UTF-8", "{\"\xFF\":1}", "invalid JSON"},
      {"overlong UTF-8", "{\"\xC0\xAF\":1}", "invalid JSON"},
      {"UTF-8 surrogate", "{\"\xED\xA0\x80\":1}", "invalid JSON"},
      {"lone high surrogate", "{\"\\ud800\":1}", "invalid JSON"},
      {"lone low surrogate", "{\"\\udc00\":1}", "invalid JSON"},
      {"bad escape", "{\"\\x41\":1}", "invalid JSON"},
      {"newline in string", "{\"a\nb\":1}", "invalid JSON"},
      {"NUL after the text", "{}" + nul, "NUL byte"},
      {"NUL hides text", "{}" + nul + "{\"a\":1}", "NUL byte"},
      {"NUL in string", "{\"a" + nul + "\":1}", "NUL byte"},
      {"same key twice", "{\"a\":1,\"b\":2,\"a\":3}", "duplicate key 'a'"},
      {"same key by escape", "{\"a\":1,\"\\u0061\":3}", "duplicate key 'a'"},
      {"same empty key", "{\"\":1,\"\":2}", "duplicate key ''"},
      {"same key inside", "{\"x\":[{\"k\":1,\"k\":1}]}", "duplicate key 'k'"},
  };
  for (const RefusedText& c : cases) {
    SCOPED_TRACE(c.name);
    expect_error(ErrorKind::kCorruptData, c.part, [&] { check_json_object(c.text, "file"); });
    expect_error(ErrorKind::kCorruptData, "file: ", [&] { check_json_object(c.text, "file"); });
  }
}

TEST(JsonGuard, AllowsTheSameKeyInDifferentObjects) {
  EXPECT_NO_THROW(check_json_object(R"({"a":{"a":{"a":1}},"b":[{"a":1},{"a":2}]})", "file"));
}

TEST(JsonGuard, RefusesDeepNestingWithoutRecursion) {
  const auto nested = [](size_t depth) {
    return "{\"a\":" + std::string(depth, '[') + std::string(depth, ']') + "}";
  };
  EXPECT_NO_THROW(check_json_object(nested(63), "file"));
  for (const size_t depth : {size_t{64}, size_t{1'000'000}}) {
    expect_error(ErrorKind::kCorruptData, "deeper than 64 levels",
                 [&] { check_json_object(nested(depth), "file"); });
  }
}

TEST(JsonGuard, RefusesLongTokensBeforeTokenizingThem) {
  JsonVisitor ignore;
  const JsonLimits limits{.max_token_bytes = 10};
  EXPECT_NO_THROW(scan_json_object(R"({"0123456789":"01234567\\"})", "file", limits, ignore));
  expect_error(ErrorKind::kCorruptData, "11 bytes; the limit is 10",
               [&] { scan_json_object(R"({"a":"0123456789x"})", "file", limits, ignore); });
  EXPECT_NO_THROW(scan_json_object(R"({"a":[1234567890,1234567890]})", "file", limits, ignore));
  expect_error(ErrorKind::kCorruptData, "11 bytes; the limit is 10",
               [&] { scan_json_object(R"({"a":[12345678901]})", "file", limits, ignore); });
  expect_error(ErrorKind::kCorruptData, "the limit is 10",
               [&] { scan_json_object(R"({"a":"01234567\"9)", "file", limits, ignore); });
}

TEST(JsonGuard, NeverPrintsHostileTextRaw) {
  try {
    check_json_object("{\"a\":1,\"\x7f\\u001b[2J\":1,\"\x7f\\u001b[2J\":1}", "file");
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_NE(std::string_view(error.what()).find("\\x7f\\x1b[2J"), std::string_view::npos);
  }
  const std::string long_junk = "{\"a\":" + std::string(100'000, '\x01') + "}";
  try {
    check_json_object(long_junk, "file");
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_LT(std::string_view(error.what()).size(), 400U);
  }
}

}  // namespace
}  // namespace narrowfloat
