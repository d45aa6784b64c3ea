// Text that came from files, made safe to print, and the reverse: text made safe to put into JSON.
//
// Tensor and file names are untrusted: they may hold newlines that forge log lines, or terminal
// escapes that rewrite the screen. Every message of this folder prints them through printable().
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace narrowfloat {

// `text` with control characters, text-direction overrides, backslashes and bytes that are not
// UTF-8 written as \n, \x1b or \u{202e}. Cut after about `max_bytes` with "...".
std::string printable(std::string_view text, size_t max_bytes = 200);

// As RFC 3629 has it: no overlong forms, no surrogates, nothing above U+10FFFF.
bool is_valid_utf8(std::string_view text);

// `text`, which must be valid UTF-8, as a JSON string literal with its quotes.
std::string json_quote(std::string_view text);

}  // namespace narrowfloat
