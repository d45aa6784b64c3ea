// The helpers that format a message and throw.
#include "base/throw_error.h"

#include <gtest/gtest.h>

#include "base/bad_enumerator.h"

namespace narrowfloat {
namespace {

template <typename Action>
void expect_error(ErrorKind kind, const std::string& message, const Action& action) {
  try {
    action();
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind);
    EXPECT_EQ(error.what(), message);
  }
}

TEST(ThrowError, FormatsTheMessageAndKeepsTheKind) {
  expect_error(ErrorKind::kUnsupported, "rows: got 3 of \"x\"",
               [] { throw_error(ErrorKind::kUnsupported, "rows: got {} of \"{}\"", 3, "x"); });
}

TEST(ThrowInvalid, IsAnInvalidArgument) {
  expect_error(ErrorKind::kInvalidArgument, "cols: 0x10", [] { throw_invalid("cols: {:#x}", 16); });
}

TEST(ThrowBadEnumerator, NamesTheTypeAndTheNumber) {
  try {
    throw_bad_enumerator("math mode", 9);
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
    EXPECT_EQ(message.find("math mode"), 0U) << message;
    EXPECT_NE(message.find("9"), std::string::npos) << message;
  }
}

}  // namespace
}  // namespace narrowfloat
