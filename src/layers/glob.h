// Shell-style patterns over tensor names: `*` any run of characters (dots and slashes too), `?` any
// one character, `[abc]`, `[a-z]`, `[!a-z]` one of a set. There is no escape character; `[*]` is a
// star. Time is at most pattern times text, whatever the pattern.
#pragma once

#include <string_view>

namespace narrowfloat {

// Whether all of `text` matches. A `[` without its `]` stands for itself.
bool glob_matches(std::string_view pattern, std::string_view text);

}  // namespace narrowfloat
