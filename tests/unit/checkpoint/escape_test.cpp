// Escaping for messages and for JSON, and the UTF-8 check both rest on.
#include "checkpoint/escape.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace narrowfloat {
namespace {

TEST(Printable, KeepsOrdinaryText) {
  EXPECT_EQ(printable("model.layers.0.mlp.weight"), "model.layers.0.mlp.weight");
  EXPECT_EQ(printable("größe 重み \xF0\x9F\x99\x82"), "größe 重み \xF0\x9F\x99\x82");
  EXPECT_EQ(printable(""), "");
}

TEST(Printable, EscapesWhatCouldForgeALineOrDriveATerminal) {
  EXPECT_EQ(printable("a\nb\r\t"), "a\\nb\\x0d\\x09");
  EXPECT_EQ(printable("\x1b[2Jx\x7f"), "\\x1b[2Jx\\x7f");
  EXPECT_EQ(printable(std::string_view("a\0b", 3)), "a\\x00b");
  EXPECT_EQ(printable("\xC2\x9B"), "\\u{9b}");
  EXPECT_EQ(printable("\xE2\x80\xAE"), "\\u{202e}");
  EXPECT_EQ(printable("a\\nb"), "a\\\\nb");
}

TEST(Printable, EscapesBytesThatAreNotUtf8) {
  EXPECT_EQ(printable("a\xFFz"), "a\\xffz");
  EXPECT_EQ(printable("\xE2\x82"), "\\xe2\\x82");
}

TEST(Printable, CutsLongText) {
  EXPECT_EQ(printable(std::string(1000, 'x'), 10), "xxxxxxxxxx...");
  EXPECT_EQ(printable(std::string(10, 'x'), 10), "xxxxxxxxxx");
}

TEST(Utf8, AcceptsExactlyTheValidSequences) {
  for (const char* valid : {"", "a", "\xC2\x80", "\xDF\xBF", "\xE0\xA0\x80", "\xED\x9F\xBF",
                            "\xEF\xBF\xBF", "\xF0\x90\x80\x80", "\xF4\x8F\xBF\xBF"}) {
    EXPECT_TRUE(is_valid_utf8(valid)) << printable(valid);
  }
  for (const char* invalid : {"\x80", "\xC0\x80", "\xC1\xBF", "\xC2", "\xC2\x41", "\xE0\x9F\xBF",
                              "\xED\xA0\x80", "\xED\xBF\xBF", "\xEF\xBF", "\xF0\x8F\xBF\xBF",
                              "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xFE", "\xFF"}) {
    EXPECT_FALSE(is_valid_utf8(invalid)) << printable(invalid);
  }
}

TEST(JsonQuote, IsReadBackByAJsonParser) {
  const std::string text = "quote\" slash\\ line\n tab\t bell\x07 größe 重み/";
  EXPECT_EQ(nlohmann::json::parse(json_quote(text)).get<std::string>(), text);
  EXPECT_EQ(json_quote("a\"b"), "\"a\\\"b\"");
  EXPECT_EQ(json_quote("\n"), "\"\\u000a\"");
}

}  // namespace
}  // namespace narrowfloat
