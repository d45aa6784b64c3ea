// The part of YAML that says what JSON with nothing but strings does: recipes are written in it.
//
// Mappings and lists in blocks or, on one line, in braces and brackets; strings plain or in either
// kind of quotes; comments. Every scalar is a string, so that none means something else than its
// author did. Anchors, aliases, tags, block scalars and several documents are refused.
#pragma once

#include <string>
#include <string_view>

namespace narrowfloat {

// The same as JSON text, whose strings are not checked yet. Throws kCorruptData for a text that is
// no such YAML, kUnsupported for the rest of the language; messages start with `source`, which must
// be printable, and the line.
std::string json_of_simple_yaml(std::string_view text, std::string_view source);

}  // namespace narrowfloat
