// Names from files and from the command line, made safe to show. They are untrusted: a newline
// would forge a line of output, a terminal escape would rewrite the screen.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace narrowfloat::cli {

// `text` with control characters, text-direction overrides, backslashes and bytes that are not
// UTF-8 written as \n, \x1b or \u{202e}.
std::string printable(std::string_view text);

// Columns that printable text takes on a terminal, one per code point.
size_t display_width(std::string_view text);

// At most `width` columns of printable text; "..." marks the cut.
std::string shortened(std::string_view text, size_t width);

}  // namespace narrowfloat::cli
