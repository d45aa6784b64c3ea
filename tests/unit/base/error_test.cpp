// Kinds of errors: their words and what an Error carries.
#include "narrowfloat/error.h"

#include <set>

#include <gtest/gtest.h>

namespace narrowfloat {
namespace {

constexpr ErrorKind kKinds[] = {ErrorKind::kInvalidArgument, ErrorKind::kUnsupported,
                                ErrorKind::kCorruptData, ErrorKind::kIo, ErrorKind::kDevice};

TEST(ErrorKind, HasWordsOfItsOwnForEachKind) {
  std::set<std::string_view> words;
  for (const ErrorKind kind : kKinds) words.insert(to_string(kind));
  EXPECT_EQ(words, (std::set<std::string_view>{"invalid argument", "unsupported", "corrupt data",
                                               "I/O error", "device error"}));
}

TEST(ErrorKind, HasTheNumbersThatBindingsRelyOn) {
  int number = 1;
  for (const ErrorKind kind : kKinds) EXPECT_EQ(static_cast<int>(kind), number++);
}

TEST(Error, CarriesItsKindAndMessageAndIsARuntimeError) {
  try {
    throw Error(ErrorKind::kIo, "file: gone");
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "file: gone");
    const auto* with_kind = dynamic_cast<const Error*>(&error);
    ASSERT_NE(with_kind, nullptr);
    EXPECT_EQ(with_kind->kind(), ErrorKind::kIo);
  }
}

}  // namespace
}  // namespace narrowfloat
