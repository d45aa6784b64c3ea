// A walk over the top level of a text that is known to be valid JSON: it only finds the positions
// at which keys and values begin and end.
#include "checkpoint/config_text.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/throw_error.h"
#include "checkpoint/escape.h"
#include "checkpoint/json_guard.h"

namespace narrowfloat {
namespace {

// Byte positions in the text; the ends are exclusive.
struct Member {
  size_t key_begin = 0;
  size_t key_end = 0;
  size_t value_begin = 0;
  size_t value_end = 0;
};

size_t skip_space(std::string_view text, size_t at) {
  return std::min(text.find_first_not_of(" \t\r\n", at), text.size());
}

// `at` is the opening quote.
size_t skip_string(std::string_view text, size_t at) {
  for (++at; text[at] != '"'; ++at) {
    if (text[at] == '\\') ++at;
  }
  return at + 1;
}

size_t skip_container(std::string_view text, size_t at) {
  int depth = 0;
  do {
    const char c = text[at];
    if (c == '"') {
      at = skip_string(text, at);
      continue;
    }
    if (c == '{' || c == '[') ++depth;
    if (c == '}' || c == ']') --depth;
    ++at;
  } while (depth > 0);
  return at;
}

size_t skip_value(std::string_view text, size_t at) {
  if (text[at] == '"') return skip_string(text, at);
  if (text[at] == '{' || text[at] == '[') return skip_container(text, at);
  return text.find_first_of(",} \t\r\n", at);
}

std::vector<Member> top_level_members(std::string_view text) {
  std::vector<Member> members;
  size_t at = skip_space(text, text.find('{') + 1);
  while (text[at] != '}') {
    Member member;
    member.key_begin = at;
    member.key_end = skip_string(text, at);
    const size_t colon = skip_space(text, member.key_end);
    member.value_begin = skip_space(text, colon + 1);
    member.value_end = skip_value(text, member.value_begin);
    members.push_back(member);
    at = skip_space(text, member.value_end);
    if (text[at] == ',') at = skip_space(text, at + 1);
  }
  return members;
}

// Keys may be spelled with escapes.
std::string decoded_key(std::string_view text, const Member& member) {
  const std::string_view literal = text.substr(member.key_begin, member.key_end - member.key_begin);
  return nlohmann::json::parse(literal).get<std::string>();
}

std::vector<Member>::const_iterator find_member(std::string_view text,
                                                const std::vector<Member>& members,
                                                std::string_view key) {
  return std::find_if(members.begin(), members.end(),
                      [&](const Member& member) { return decoded_key(text, member) == key; });
}

std::string replace(std::string_view text, size_t begin, size_t end, std::string_view with) {
  std::string out(text.substr(0, begin));
  out += with;
  out += text.substr(end);
  return out;
}

// The text of an object without one of its members.
std::string without_member(std::string_view json_text, std::string_view key) {
  const std::vector<Member> members = top_level_members(json_text);
  const auto found = find_member(json_text, members, key);
  if (found == members.end()) return std::string(json_text);
  // The comma before the member goes too; for the first member, the comma after it.
  if (found != members.begin()) {
    return replace(json_text, std::prev(found)->value_end, found->value_end, "");
  }
  const bool is_only = members.size() == 1;
  return replace(json_text, found->key_begin,
                 is_only ? found->value_end : std::next(found)->key_begin, "");
}

constexpr std::string_view kSource = "configuration text";

}  // namespace

std::string set_top_level_member(std::string_view json_text, std::string_view key,
                                 std::string_view value_json) {
  check_json_object(json_text, kSource);
  if (!nlohmann::json::accept(value_json)) {
    throw_invalid("the new value of '{}' is not JSON", printable(key));
  }
  const std::vector<Member> members = top_level_members(json_text);
  const auto found = find_member(json_text, members, key);
  if (found != members.end()) {
    return replace(json_text, found->value_begin, found->value_end, value_json);
  }
  std::string member;
  size_t at = json_text.find('{') + 1;
  if (members.empty()) {
    member = json_quote(key) + ": ";
  } else {
    const Member& last = members.back();
    const size_t space = json_text.find_last_not_of(" \t\r\n", last.key_begin - 1) + 1;
    member = ",";
    member += json_text.substr(space, last.key_begin - space);
    member += json_quote(key);
    member += json_text.substr(last.key_end, last.value_begin - last.key_end);
    at = last.value_end;
  }
  member += value_json;
  return replace(json_text, at, at, member);
}

std::string remove_top_level_member(std::string_view json_text, std::string_view key) {
  check_json_object(json_text, kSource);
  return without_member(json_text, key);
}

std::string remove_nested_member(std::string_view json_text, std::string_view key) {
  check_json_object(json_text, kSource);
  std::string out;
  size_t copied = 0;
  for (const Member& member : top_level_members(json_text)) {
    const std::string_view value =
        json_text.substr(member.value_begin, member.value_end - member.value_begin);
    if (!value.starts_with('{')) continue;
    out += json_text.substr(copied, member.value_begin - copied);
    out += without_member(value, key);
    copied = member.value_end;
  }
  return out.append(json_text.substr(copied));
}

}  // namespace narrowfloat
