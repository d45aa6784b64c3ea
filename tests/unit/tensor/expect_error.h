// Expects a refused argument: kInvalidArgument and a message with given words.
#pragma once

#include <string>

#include <gtest/gtest.h>

#include "narrowfloat/error.h"

namespace narrowfloat {

// `message` is the whole message.
template <typename Action>
void expect_invalid(const std::string& message, const Action& action) {
  try {
    action();
    ADD_FAILURE() << "nothing was thrown; expected: " << message;
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
    EXPECT_EQ(std::string(error.what()), message);
  }
}

}  // namespace narrowfloat
