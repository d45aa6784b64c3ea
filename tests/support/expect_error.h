// Expecting an Error of a kind whose message has certain parts: argument, expected, got.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "narrowfloat/error.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat::testing {

inline constexpr auto kInvalid = ErrorKind::kInvalidArgument;

inline void expect_error(ErrorKind kind, const std::vector<std::string>& fragments,
                         const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(to_string(kind), to_string(error.kind())) << message;
    for (const std::string& fragment : fragments) {
      EXPECT_NE(message.find(fragment), std::string::npos)
          << "no \"" << fragment << "\" in: " << message;
    }
    return;
  }
  ADD_FAILURE() << "no Error was thrown";
}

inline bool build_has_cuda() { return build_info().cuda_enabled; }

}  // namespace narrowfloat::testing
