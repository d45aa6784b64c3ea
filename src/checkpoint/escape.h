// Makes text from files safe to print, and text safe to put into JSON.
//
// Tensor and file names are untrusted: they may hold newlines that forge log lines, or terminal
// escapes that rewrite the screen. Every message of this folder prints them through printable(),
// which is public: programs need it too.
#pragma once

#include <string>
#include <string_view>

#include "narrowfloat/safetensors.h"

namespace narrowfloat {

// Validity as in RFC 3629: no overlong forms, no surrogates, nothing above U+10FFFF.
bool is_valid_utf8(std::string_view text);

// `text`, which must be valid UTF-8, as a JSON string literal with its quotes.
std::string json_quote(std::string_view text);

}  // namespace narrowfloat
