// Options that are words in Python and enumerations in C++.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

#include "narrowfloat/error.h"

namespace narrowfloat::python {

// The value whose word is `text`. Throws kInvalidArgument that lists the accepted words.
template <typename Enum>
Enum parse_choice(std::string_view argument, std::string_view text,
                  std::initializer_list<std::pair<std::string_view, Enum>> choices) {
  std::string words;
  for (const auto& [word, value] : choices) {
    if (word == text) return value;
    words += words.empty() ? "" : ", ";
    words += word;
  }
  throw Error(ErrorKind::kInvalidArgument, std::string(argument) + ": expected one of " + words +
                                               "; got \"" + std::string(text) + "\"");
}

}  // namespace narrowfloat::python
