// Only the last star is retried: an earlier one could not match better than it does.
#include <optional>
#include <string_view>

#include "narrowfloat/checkpoint.h"

namespace narrowfloat {
namespace {

// The first element of a pattern that takes one character: its length, and whether it takes `c`.
struct Step {
  size_t length = 1;
  bool matches = false;
};

// The set at the start of `pattern`; empty if its closing bracket is missing. A `]` right after the
// opening is a member.
std::optional<Step> match_set(std::string_view pattern, char c) {
  const bool is_negated = pattern.size() > 1 && pattern[1] == '!';
  const size_t first = is_negated ? 2 : 1;
  bool found = false;
  for (size_t i = first; i < pattern.size(); ++i) {
    if (pattern[i] == ']' && i > first) return Step{i + 1, found != is_negated};
    if (i + 2 < pattern.size() && pattern[i + 1] == '-' && pattern[i + 2] != ']') {
      found = found || (pattern[i] <= c && c <= pattern[i + 2]);
      i += 2;
    } else {
      found = found || pattern[i] == c;
    }
  }
  return std::nullopt;
}

Step match_one(std::string_view pattern, char c) {
  if (pattern.front() == '[') {
    if (const std::optional<Step> set = match_set(pattern, c)) return *set;
  }
  return {1, pattern.front() == '?' || pattern.front() == c};
}

}  // namespace

bool glob_matches(std::string_view pattern, std::string_view text) {
  size_t at = 0;
  size_t p = 0;
  std::optional<size_t> star;  // Position after the last star of the pattern...
  size_t star_text = 0;        // ...and the position in the text at which the rest was tried.
  while (at < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = ++p;
      star_text = at;
      continue;
    }
    const Step step = p < pattern.size() ? match_one(pattern.substr(p), text[at]) : Step{};
    if (step.matches) {
      p += step.length;
      ++at;
    } else if (star) {
      p = *star;
      at = ++star_text;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', p) == std::string_view::npos;
}

}  // namespace narrowfloat
