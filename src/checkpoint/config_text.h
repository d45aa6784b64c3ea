// Changes one member of a JSON text and keeps every other byte: key order, unknown keys, number
// spelling, indentation. A rewritten config.json thus differs from its source only in that member.
#pragma once

#include <string>
#include <string_view>

namespace narrowfloat {

// `json_text` must be a JSON object. A new member goes last, spaced like the one before it.
// `value_json` is inserted unchanged: its inner lines keep the caller's indentation. Throws
// kCorruptData for a text that is not a strict JSON object, kInvalidArgument for a value that is
// not JSON.
std::string set_top_level_member(std::string_view json_text, std::string_view key,
                                 std::string_view value_json);

// Changes nothing if there is no such member.
std::string remove_top_level_member(std::string_view json_text, std::string_view key);

// Removes a member from each object that is the value of a top-level member.
std::string remove_nested_member(std::string_view json_text, std::string_view key);

}  // namespace narrowfloat
